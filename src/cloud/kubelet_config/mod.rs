//! The kubelet configuration of a node class: the members that decide a node's resources and its boot. The map is open (any member
//! of `kubelet.config.k8s.io/v1beta1`); `cloud::ec2::bootstrap::kubelet_validation` validates it. With Karpenter's feature gate
//! NodeClassCEL, `maxPods` and reserved amounts may be [`expressions`].

pub mod expression;
pub mod expressions;
pub mod programs;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use stowage_api::go_duration::GoDuration;
use stowage_api::validation::is_quantity;

/// A class's `spec.kubelet` as it is stored.
pub type KubeletMap = BTreeMap<String, Value>;

/// An interpreted member of the kubelet configuration has a wrong type. Validation reports details.
#[derive(Debug, thiserror::Error)]
#[error("spec.kubelet can't be read: {0}")]
pub struct KubeletError(#[from] serde_json::Error);

/// The interpreted members of the configuration. `null` counts as absent.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub struct Kubelet {
    /// Addresses of the cluster DNS; by default the discovered one.
    #[serde(rename = "clusterDNS")]
    pub cluster_dns: Option<Vec<String>>,
    /// Maximum number of pods.
    pub max_pods: Option<MaxPods>,
    /// Maximum number of pods per vCPU; 0 for no limit.
    pub pods_per_core: Option<i32>,
    /// Amounts reserved for the system, by resource.
    pub system_reserved: Option<BTreeMap<String, String>>,
    /// Amounts reserved for Kubernetes daemons, by resource.
    pub kube_reserved: Option<BTreeMap<String, String>>,
    /// Hard eviction thresholds by signal.
    pub eviction_hard: Option<BTreeMap<String, String>>,
    /// Soft eviction thresholds by signal.
    pub eviction_soft: Option<BTreeMap<String, String>>,
    /// Grace periods of [`Kubelet::eviction_soft`], by signal.
    pub eviction_soft_grace_period: Option<BTreeMap<String, GoDuration>>,
    /// Maximum grace period of a pod evicted by a soft threshold, in seconds.
    pub eviction_max_pod_grace_period: Option<i32>,
    /// Disk usage above which images are garbage-collected, percent.
    #[serde(rename = "imageGCHighThresholdPercent")]
    pub image_gc_high_threshold_percent: Option<i32>,
    /// Disk usage below which images are not garbage-collected, percent.
    #[serde(rename = "imageGCLowThresholdPercent")]
    pub image_gc_low_threshold_percent: Option<i32>,
    /// Whether CPU limits are enforced by CFS quota.
    #[serde(rename = "cpuCFSQuota")]
    pub cpu_cfs_quota: Option<bool>,
}

/// `maxPods`: a number, or an expression that is evaluated for each instance type.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(untagged)]
pub enum MaxPods {
    Count(i32),
    /// An expression; counts as unset where [`expressions`] are off.
    Expression(String),
}

/// The names of the interpreted members in the configuration, sorted.
pub const INTERPRETED: [&str; 12] = [
    "clusterDNS",
    "cpuCFSQuota",
    "evictionHard",
    "evictionMaxPodGracePeriod",
    "evictionSoft",
    "evictionSoftGracePeriod",
    "imageGCHighThresholdPercent",
    "imageGCLowThresholdPercent",
    "kubeReserved",
    "maxPods",
    "podsPerCore",
    "systemReserved",
];

impl Kubelet {
    /// Parses the interpreted members; all are absent where there is no configuration.
    ///
    /// # Errors
    /// A member has a wrong type, or a grace period is not a duration.
    pub fn parse(map: Option<&KubeletMap>) -> Result<Self, KubeletError> {
        let Some(map) = map else {
            return Ok(Self::default());
        };
        let known = |name: &&str| map.get(*name).map(|value| ((*name).to_owned(), value.clone()));
        let members: Map<String, Value> = INTERPRETED.iter().filter_map(known).collect();
        Ok(serde_json::from_value(Value::Object(members))?)
    }

    /// `maxPods` where it is a number.
    pub fn max_pods_count(&self) -> Option<i32> {
        match self.max_pods {
            Some(MaxPods::Count(count)) => Some(count),
            Some(MaxPods::Expression(_)) | None => None,
        }
    }

    /// Whether any member is an expression: `maxPods` as text, or a reserved amount that is not a quantity.
    pub fn has_expressions(&self) -> bool {
        let reserved = [&self.kube_reserved, &self.system_reserved];
        matches!(self.max_pods, Some(MaxPods::Expression(_)))
            || reserved.into_iter().flatten().flat_map(BTreeMap::values).any(|amount| !is_quantity(amount))
    }

    /// [`Kubelet::kube_reserved`] without its expressions.
    pub fn fixed_kube_reserved(&self) -> Option<BTreeMap<String, String>> {
        self.kube_reserved.as_ref().map(quantities)
    }

    /// [`Kubelet::system_reserved`] without its expressions.
    pub fn fixed_system_reserved(&self) -> Option<BTreeMap<String, String>> {
        self.system_reserved.as_ref().map(quantities)
    }
}

/// The entries that are quantities; the others are expressions.
fn quantities(amounts: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let fixed = amounts.iter().filter(|(_, amount)| is_quantity(amount));
    fixed.map(|(resource, amount)| (resource.clone(), amount.clone())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(value: Value) -> KubeletMap {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn interpreted_members_are_parsed_and_others_ignored() {
        let read = Kubelet::parse(Some(&map(json!({
            "clusterDNS": ["10.0.0.10"], "maxPods": 30, "podsPerCore": 2, "cpuCFSQuota": false,
            "systemReserved": {"cpu": "100m"}, "kubeReserved": {"memory": "1Gi"},
            "evictionHard": {"memory.available": "5%"}, "evictionSoft": {"memory.available": "10%"},
            "evictionSoftGracePeriod": {"memory.available": "1m30s"}, "evictionMaxPodGracePeriod": 60,
            "imageGCHighThresholdPercent": 85, "imageGCLowThresholdPercent": 80,
            "serializeImagePulls": 7, "logging": null,
        }))))
        .unwrap();
        let one = |key: &str, value: &str| Some(BTreeMap::from([(key.to_owned(), value.to_owned())]));
        assert_eq!(
            read,
            Kubelet {
                cluster_dns: Some(vec!["10.0.0.10".into()]),
                max_pods: Some(MaxPods::Count(30)),
                pods_per_core: Some(2),
                system_reserved: one("cpu", "100m"),
                kube_reserved: one("memory", "1Gi"),
                eviction_hard: one("memory.available", "5%"),
                eviction_soft: one("memory.available", "10%"),
                eviction_soft_grace_period: Some(
                    [("memory.available".to_owned(), "1m30s".parse().unwrap())].into_iter().collect()
                ),
                eviction_max_pod_grace_period: Some(60),
                image_gc_high_threshold_percent: Some(85),
                image_gc_low_threshold_percent: Some(80),
                cpu_cfs_quota: Some(false),
            }
        );
        assert_eq!(Kubelet::parse(None).unwrap(), Kubelet::default());
        assert_eq!(Kubelet::parse(Some(&map(json!({"maxPods": null})))).unwrap(), Kubelet::default());
    }

    #[test]
    fn expressions_are_recognized_and_left_out() {
        for (value, expected) in [
            (json!({"maxPods": "vcpus * 10"}), true),
            (json!({"maxPods": 10}), false),
            (json!({"kubeReserved": {"cpu": "vcpus * 10", "memory": "1Gi"}}), true),
            (json!({"systemReserved": {"cpu": "max(vcpus, 2)", "memory": "1Gi"}}), true),
            (json!({"systemReserved": {"cpu": "100m"}, "kubeReserved": {"pid": "1000"}}), false),
            (json!({"evictionHard": {"memory.available": "5%"}}), false),
        ] {
            let read = Kubelet::parse(Some(&map(value.clone()))).unwrap();
            assert_eq!(read.has_expressions(), expected, "{value}");
            for fixed in [read.fixed_kube_reserved(), read.fixed_system_reserved()].into_iter().flatten() {
                assert!(fixed.values().all(|amount| is_quantity(amount)), "{value}");
            }
        }
        let read = Kubelet::parse(Some(&map(json!({"kubeReserved": {"cpu": "vcpus * 10", "memory": "1Gi"}})))).unwrap();
        assert_eq!(read.fixed_kube_reserved(), Some([("memory".to_owned(), "1Gi".to_owned())].into()));
        assert_eq!(read.max_pods_count(), None);
    }

    #[test]
    fn an_interpreted_member_of_a_wrong_type_is_rejected() {
        let wrong = [
            json!("10.0.0.10"),
            json!("true"),
            json!({"memory.available": 5}),
            json!("30"),
            json!({"memory.available": 5}),
            json!({"memory.available": "5x"}),
            json!("80"),
            json!("70"),
            json!({"cpu": 1}),
            json!(true),
            json!("10"),
            json!({"cpu": 1}),
        ];
        for (name, value) in INTERPRETED.iter().zip(wrong) {
            assert!(Kubelet::parse(Some(&map(json!({*name: value})))).is_err(), "{name}");
        }
    }
}
