//! Amazon EC2, through the AWS SDK.
//!
//! What a request says and what an answer means are pure functions, tested with tables; the shells around them only call, page
//! and hand over. Nothing that the planner asks for does I/O.
//!
//! - [`client`], [`rate`], [`errors`], [`coalesce`]: the calls themselves.
//! - [`resolve`]: what a node class comes to ([`subnets`], [`security_groups`], [`images`] and [`aliases`], [`profile`],
//!   [`placement`], [`reservations`]), and [`validate`], whether EC2 would launch it (by a [`dry_type`]).
//! - [`launch`]: the NodeClaims of a group become instances ([`batches`], [`attempts`], [`choose`], [`choose_reserved`], [`prepare`],
//!   [`launch_template`], [`templates`], [`fleet`]), and what that teaches ([`unavailable`],
//!   [`reservation_counts`]). [`launch_shapes`], [`ahead`]: templates are there before the next launch asks.
//! - [`instances`], [`tagging`]: describing, listing, terminating, tagging.
//! - [`region`]: what can be bought ([`types`], [`prices`], [`spot_prices`], [`placement_scores`], [`offerings`]), kept fresh by
//!   [`refresh`]; [`discovered_memory`]: what nodes showed of it.
//! - [`queue`], [`messages`], [`status_checks`]: what EC2 tells of instances by itself; [`drift`]: whether they still are what
//!   their class comes to. [`zonal_shift`]: zones to keep out of.
//! - [`user_data`], [`kubelet`]: what instances are told at boot.
//! - [`metrics`], [`troubles`]: what is published of all this, and what people are told of.
//! - [`preflight`]: whether an account is fit for all this, without changing anything in it.

mod ahead;
pub mod aliases;
pub mod attempts;
pub mod batches;
mod catalogues;
pub mod choose;
pub mod choose_reserved;
pub mod class_view;
pub mod client;
pub mod cluster;
pub mod coalesce;
mod discovered_memory;
pub mod drift;
mod dry_type;
pub mod errors;
pub mod fleet;
pub mod images;
pub mod instances;
pub mod interruption_history;
pub mod kubelet;
mod launch;
mod launch_shapes;
pub mod launch_template;
pub mod messages;
mod metrics;
pub mod offerings;
pub mod placement;
pub mod placement_scores;
pub mod preflight;
pub mod prepare;
pub mod prices;
pub mod profile;
pub mod queue;
pub mod rate;
pub mod receipts;
pub mod refresh;
pub mod region;
pub mod reservation_counts;
pub mod reservations;
pub mod resolve;
pub mod security_groups;
pub mod selectors;
mod shell;
pub mod spot_prices;
pub mod spot_risk;
pub mod status_checks;
pub mod subnets;
pub mod tagging;
pub mod templates;
mod troubles;
pub mod types;
pub mod unavailable;
pub mod user_data;
pub mod validate;
pub mod zonal_shift;

#[cfg(test)]
mod live_tests;

use std::time::Duration;

pub use client::Clients;
pub use metrics::publish;
pub use shell::{Ec2, StartError};

use crate::api::Ec2NodeClass;
use crate::cloud::catalogue::NodeSettings;

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

/// Milliseconds since the epoch.
fn now_ms() -> i64 {
    k8s_openapi::jiff::Timestamp::now().as_millisecond()
}
