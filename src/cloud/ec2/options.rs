//! Settings of the EC2 provider.

use std::time::Duration;

use crate::api::Ec2NodeClass;
use crate::cloud::catalog::NodeSettings;

/// Settings of EC2, with the names and defaults of Karpenter's.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the cluster: instances, templates and profiles are found by it.
    pub cluster_name: String,
    /// URL of the API server that instances are told; from EKS when absent.
    pub cluster_endpoint: Option<String>,
    /// CA of the API server that instances are told, base64; this process's own when absent.
    pub cluster_ca_bundle: Option<String>,
    /// Addresses of services; from EKS or the API server when absent.
    pub service_cidr: Option<String>,
    /// Whether EKS tells the version of the cluster.
    pub eks_control_plane: bool,
    /// Whether IAM and the price list can't be reached.
    pub isolated_vpc: bool,
    /// Name of the interruption queue.
    pub interruption_queue: Option<String>,
    /// Whether launches are tried dry before a class is Ready.
    pub dry_run: bool,
    /// How old what a node class comes to may get.
    pub refresh: Duration,
    /// Network interfaces that pods' addresses can't be on.
    pub reserved_enis: i64,
    /// Share of memory that hypervisor and firmware keep, millionths.
    pub vm_memory_overhead_ppm: i64,
    /// Whether capacity reservations are used (the feature gate ReservedCapacity).
    pub reserved_capacity: bool,
    /// Whether a launch that has fewer distinct values left than a claim's `minValues` is no launch (`--min-values-policy Strict`).
    pub strict_min_values: bool,
    /// A placement score below this one counts against a spot offering; from 1 (none does) to 10.
    pub spot_score_threshold: u8,
    /// Whether zones that ARC shifts the cluster away from are left alone.
    pub zonal_shift: bool,
    /// Whether kubelet configurations may hold expressions (the feature gate NodeClassCEL).
    pub node_class_cel: bool,
}

impl Options {
    /// The defaults, for a cluster.
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
        }
    }

    /// What a class decides about the shape of its nodes, with what these settings add.
    pub fn settings(&self, class: &Ec2NodeClass) -> NodeSettings {
        let settings = NodeSettings::of(Some(class));
        let settings = if self.node_class_cel { settings.with_expressions(class) } else { settings };
        let (reserved_enis, vm_memory_overhead_ppm) = (self.reserved_enis, self.vm_memory_overhead_ppm);
        NodeSettings { reserved_enis, vm_memory_overhead_ppm, ..settings }
    }
}
