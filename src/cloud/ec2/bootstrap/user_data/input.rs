//! The inputs of user data, the boot parameters derived from them, and the errors.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Taint;
use stowage_model::labels as keys;
use stowage_model::offering::CapacityType;

use crate::ami_family::AmiFamily;
use crate::ec2::bootstrap::user_data::mime::MimeError;
use crate::kubelet_config::{Kubelet, KubeletError, KubeletMap};

/// The inputs of an instance's user data.
#[derive(Clone, Copy, Debug)]
pub struct UserDataInput<'a> {
    pub cluster_name: &'a str,
    /// URL of the API server.
    pub endpoint: &'a str,
    /// CA of the API server, base64.
    pub ca_bundle: Option<&'a str>,
    /// CIDR of services; required by AL2023.
    pub service_cidr: Option<&'a str>,
    /// Discovered address of the cluster DNS; the class's `clusterDNS` overrides it.
    pub cluster_dns: Option<IpAddr>,
    /// The class's `spec.kubelet`.
    pub kubelet: Option<&'a KubeletMap>,
    /// Maximum number of pods of the instance type; the class's `maxPods` overrides it.
    pub max_pods: i64,
    /// The NodeClaim's labels.
    pub labels: &'a BTreeMap<String, String>,
    /// The NodeClaim's taints and startup taints.
    pub taints: &'a [Taint],
    pub capacity_type: CapacityType,
    /// Whether local disks are combined into one volume for pods (`instanceStorePolicy: RAID0`).
    pub local_disks: bool,
    /// The class's `spec.userData`.
    pub custom: Option<&'a str>,
    /// Version of a Bottlerocket image, where known ([`image_version`](crate::ec2::bootstrap::user_data::image_version)).
    pub image_version: Option<&'a str>,
}

/// Why user data can't be generated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UserDataError {
    /// The class's kubelet configuration is invalid.
    #[error("{0}")]
    Kubelet(String),
    /// The class's user data starts as MIME but is malformed.
    #[error("spec.userData begins as MIME, but {0}")]
    Mime(#[from] MimeError),
    /// The class's user data is not valid TOML for Bottlerocket.
    #[error("spec.userData is not TOML: {0}")]
    Toml(String),
    /// A setting in the class's user data has a wrong type.
    #[error("spec.userData: {setting}: expected {expected}, found {found}")]
    Setting {
        /// Path of the setting.
        setting: String,
        expected: &'static str,
        found: &'static str,
    },
    /// AL2023 needs the service CIDR, and it is not known: the class is not ready.
    #[error("the cluster's service CIDR is not known: allow eks:DescribeCluster, or name it in the service's settings")]
    NoServiceCidr,
    /// The CA bundle is not base64.
    #[error("the cluster's CA bundle is not base64: {0}")]
    CaBundle(String),
    /// Serialization failed.
    #[error("the user data could not be written: {0}")]
    Write(String),
}

impl From<KubeletError> for UserDataError {
    fn from(error: KubeletError) -> Self {
        Self::Kubelet(error.to_string())
    }
}

/// The resolved boot parameters that every family except Custom passes to its kubelet.
pub(crate) struct BootParameters<'a> {
    pub(crate) input: &'a UserDataInput<'a>,
    pub(crate) kubelet: Kubelet,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) taints: Vec<Taint>,
    /// Addresses of the cluster DNS: the class's, else the discovered one.
    pub(crate) cluster_dns: Vec<String>,
    pub(crate) max_pods: i64,
}

impl<'a> BootParameters<'a> {
    pub(crate) fn of(family: AmiFamily, input: &'a UserDataInput<'a>) -> Result<Self, UserDataError> {
        let mut kubelet = Kubelet::parse(input.kubelet)?;
        kubelet.kube_reserved = kubelet.fixed_kube_reserved();
        kubelet.system_reserved = kubelet.fixed_system_reserved();
        let named = kubelet.cluster_dns.clone().filter(|addresses| !addresses.is_empty());
        let discovered = || input.cluster_dns.iter().map(IpAddr::to_string).collect();
        Ok(Self {
            input,
            labels: node_labels(family, input.labels, input.capacity_type),
            taints: node_taints(input.taints),
            cluster_dns: named.unwrap_or_else(discovered),
            max_pods: kubelet.max_pods_count().map_or(input.max_pods, i64::from),
            kubelet,
        })
    }

    /// The class's user data, if it is not empty.
    pub(crate) fn custom(&self) -> Option<&'a str> {
        self.input.custom.filter(|text| !text.trim().is_empty())
    }
}

/// Domains of labels that a kubelet may not set on its own Node (NodeRestriction admission).
const FORBIDDEN_DOMAINS: [&str; 3] = ["kubernetes.io", "k8s.io", "node-restriction.kubernetes.io"];

/// The labels that a kubelet registers its Node with: the claim's labels, the capacity type, and, on images that set their taints
/// themselves, the label against taint synchronization. Zone, instance type and similar labels are synchronized from the claim after
/// registration.
pub fn node_labels(
    family: AmiFamily,
    claim: &BTreeMap<String, String>,
    capacity_type: CapacityType,
) -> BTreeMap<String, String> {
    let mut labels = claim.clone();
    labels.insert(keys::CAPACITY_TYPE.to_owned(), capacity_type.as_str().to_owned());
    if family != AmiFamily::Custom {
        labels.insert(keys::DO_NOT_SYNC_TAINTS.to_owned(), "true".to_owned());
    }
    labels.retain(|key, _| !is_forbidden(key));
    labels
}

fn is_forbidden(key: &str) -> bool {
    key.split_once('/').is_some_and(|(domain, _)| {
        let below =
            |parent: &str| domain.strip_suffix(parent).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        FORBIDDEN_DOMAINS.into_iter().any(below)
    })
}

/// The taints that a kubelet registers its Node with: the claim's taints and the unregistered taint.
fn node_taints(claim: &[Taint]) -> Vec<Taint> {
    let unregistered =
        Taint { key: keys::UNREGISTERED_TAINT.to_owned(), effect: "NoExecute".to_owned(), ..Taint::default() };
    let mut taints = claim.to_vec();
    if !taints.iter().any(|taint| taint.key == unregistered.key && taint.effect == unregistered.effect) {
        taints.push(unregistered);
    }
    taints
}
