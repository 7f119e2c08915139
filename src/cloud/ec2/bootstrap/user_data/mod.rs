//! User data: what an instance is told at boot, in the format of its AMI family, merged with what the class's owner
//! wrote. Pure: text in, text out; the caller encodes it as base64 and counts its bytes.

pub mod al2;
pub mod bottlerocket;
pub mod flags;
pub mod mime;
pub mod nodeadm;
pub mod windows;

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Taint;

pub use crate::cloud::ec2::bootstrap::user_data::bottlerocket::{ignored_settings, image_version};
pub use crate::cloud::ec2::bootstrap::user_data::mime::MimeError;

use crate::cloud::ami_family::AmiFamily;
use crate::cloud::kubelet_config::{Kubelet, KubeletError, KubeletMap};
use crate::model::labels as keys;
use crate::model::offering::CapacityType;

/// What the user data of an instance is made from.
#[derive(Clone, Copy, Debug)]
pub struct UserDataInput<'a> {
    /// Name of the cluster.
    pub cluster_name: &'a str,
    /// URL of the API server.
    pub endpoint: &'a str,
    /// CA of the API server, base64.
    pub ca_bundle: Option<&'a str>,
    /// Range of the addresses of Services; AL2023 can't do without.
    pub service_cidr: Option<&'a str>,
    /// Address of the cluster's DNS as discovered; the class's `clusterDNS` goes first.
    pub cluster_dns: Option<IpAddr>,
    /// The class's `spec.kubelet`.
    pub kubelet: Option<&'a KubeletMap>,
    /// Most pods of the instance, as counted for its type; the class's `maxPods` goes first.
    pub max_pods: i64,
    /// The NodeClaim's labels.
    pub labels: &'a BTreeMap<String, String>,
    /// The NodeClaim's taints and start-up taints.
    pub taints: &'a [Taint],
    /// How the instance is bought.
    pub capacity_type: CapacityType,
    /// Whether local disks become one volume for pods (`instanceStorePolicy: RAID0`).
    pub local_disks: bool,
    /// The class's `spec.userData`.
    pub custom: Option<&'a str>,
    /// Version of a Bottlerocket image where it is known ([`image_version`]).
    pub image_version: Option<&'a str>,
}

/// Why no user data can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UserDataError {
    /// The class's kubelet configuration can't be read.
    #[error("{0}")]
    Kubelet(String),
    /// The class's user data begins as MIME and does not go on so.
    #[error("spec.userData begins as MIME, but {0}")]
    Mime(#[from] MimeError),
    /// The class's user data is not the TOML that Bottlerocket reads.
    #[error("spec.userData is not TOML: {0}")]
    Toml(String),
    /// A setting in the class's user data has a wrong type.
    #[error("spec.userData: {setting}: expected {expected}, found {found}")]
    Setting {
        /// Path of the setting.
        setting: String,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// AL2023 needs the range of Services' addresses, and it is not known (yet): the class is not ready.
    #[error("the cluster's service CIDR is not known: allow eks:DescribeCluster, or name it in the service's settings")]
    NoServiceCidr,
    /// The CA bundle is not base64.
    #[error("the cluster's CA bundle is not base64: {0}")]
    CaBundle(String),
    /// The text could not be written.
    #[error("the user data could not be written: {0}")]
    Write(String),
}

impl From<KubeletError> for UserDataError {
    fn from(error: KubeletError) -> Self {
        Self::Kubelet(error.to_string())
    }
}

/// The user data of an instance of the family, before base64. The same input gives the same text, whatever the order of
/// its maps.
///
/// # Errors
/// The class's user data or kubelet configuration can't be used, or the cluster is not known well enough for the
/// family.
pub fn user_data(family: AmiFamily, input: &UserDataInput<'_>) -> Result<String, UserDataError> {
    if family == AmiFamily::Custom {
        return Ok(input.custom.unwrap_or_default().to_owned());
    }
    let boot = Boot::of(family, input)?;
    match family {
        AmiFamily::Al2 => al2::user_data(&boot),
        AmiFamily::Al2023 => nodeadm::user_data(&boot),
        AmiFamily::Bottlerocket => bottlerocket::user_data(&boot),
        AmiFamily::Windows2019 | AmiFamily::Windows2022 | AmiFamily::Windows2025 | AmiFamily::Custom => {
            Ok(windows::user_data(&boot))
        }
    }
}

/// What every family but Custom tells its kubelet, each thing decided.
struct Boot<'a> {
    input: &'a UserDataInput<'a>,
    kubelet: Kubelet,
    labels: BTreeMap<String, String>,
    taints: Vec<Taint>,
    /// Addresses of the cluster's DNS: the class's, else the one discovered.
    cluster_dns: Vec<String>,
    max_pods: i64,
}

impl<'a> Boot<'a> {
    fn of(family: AmiFamily, input: &'a UserDataInput<'a>) -> Result<Self, UserDataError> {
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

    /// The class's user data, where there is any.
    fn custom(&self) -> Option<&'a str> {
        self.input.custom.filter(|text| !text.trim().is_empty())
    }
}

/// Domains whose labels a kubelet may not give its own Node.
const FORBIDDEN_DOMAINS: [&str; 3] = ["kubernetes.io", "k8s.io", "node-restriction.kubernetes.io"];

/// The labels that a kubelet registers its Node with: the claim's, how the instance is bought, and, on images that
/// bring their taints themselves, that the taints need no sync. Zone, instance type and the like come from the claim
/// once the Node is there.
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

/// The taints that a kubelet registers its Node with: the claim's, and the one that holds until the Node is registered.
fn node_taints(claim: &[Taint]) -> Vec<Taint> {
    let unregistered =
        Taint { key: keys::UNREGISTERED_TAINT.to_owned(), effect: "NoExecute".to_owned(), ..Taint::default() };
    let mut taints = claim.to_vec();
    if !taints.iter().any(|taint| taint.key == unregistered.key && taint.effect == unregistered.effect) {
        taints.push(unregistered);
    }
    taints
}

#[cfg(test)]
mod tests;
