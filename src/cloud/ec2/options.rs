//! Settings of the EC2 provider.

use std::time::Duration;

use stowage_api::Ec2NodeClass;

use crate::catalog::NodeSettings;

/// Settings of EC2, with Karpenter's names and defaults.
#[derive(Clone, Debug)]
pub struct Options {
    /// Cluster name; instances, launch templates and instance profiles are found by it.
    pub cluster_name: String,
    /// URL of the API server for instances; `None` reads it from EKS.
    pub cluster_endpoint: Option<String>,
    /// CA bundle of the API server for instances, base64; `None` selects the CA that this process uses.
    pub cluster_ca_bundle: Option<String>,
    /// Service CIDR; `None` reads it from EKS or the API server.
    pub service_cidr: Option<String>,
    /// Whether the cluster version is read from the EKS API.
    pub eks_control_plane: bool,
    /// Whether the VPC has no route to IAM and the price list.
    pub isolated_vpc: bool,
    /// Name of the interruption queue.
    pub interruption_queue: Option<String>,
    /// Whether dry-run launches validate a class before it is Ready.
    pub dry_run: bool,
    /// Maximum age of a resolved node class.
    pub refresh: Duration,
    /// ENIs reserved for other uses; subtracted when computing max pods.
    pub reserved_enis: i64,
    /// Fraction of memory that hypervisor and firmware reserve, in millionths.
    pub vm_memory_overhead_ppm: i64,
    /// Whether capacity reservations are used (the feature gate ReservedCapacity).
    pub reserved_capacity: bool,
    /// Whether a launch with fewer distinct values left than a claim's `minValues` is refused (`--min-values-policy Strict`).
    pub strict_min_values: bool,
    /// Spot placement score, 1 to 10, below which an offering is penalized.
    pub spot_score_threshold: u8,
    /// Whether ARC zonal shift is respected.
    pub zonal_shift: bool,
    /// Whether kubelet configurations may contain CEL expressions (the feature gate NodeClassCEL).
    pub node_class_cel: bool,
    /// Whether `/metrics` has series of each instance type and offering.
    pub offering_metrics: bool,
}

impl Options {
    /// The defaults for a cluster.
    pub fn of(cluster_name: impl Into<String>) -> Self {
        Self {
            cluster_name: cluster_name.into(),
            cluster_endpoint: None,
            cluster_ca_bundle: None,
            service_cidr: None,
            eks_control_plane: false,
            isolated_vpc: false,
            interruption_queue: None,
            dry_run: true,
            refresh: Duration::from_mins(1),
            reserved_enis: 0,
            vm_memory_overhead_ppm: 75_000,
            reserved_capacity: true,
            strict_min_values: true,
            spot_score_threshold: 7,
            zonal_shift: false,
            node_class_cel: false,
            offering_metrics: true,
        }
    }

    /// The settings of a class that decide the resources of its nodes, with the additions of these options.
    pub fn settings(&self, class: &Ec2NodeClass) -> NodeSettings {
        let settings = NodeSettings::of(Some(class));
        let settings = if self.node_class_cel { settings.with_expressions(class) } else { settings };
        let (reserved_enis, vm_memory_overhead_ppm) = (self.reserved_enis, self.vm_memory_overhead_ppm);
        NodeSettings { reserved_enis, vm_memory_overhead_ppm, ..settings }
    }
}
