//! Amazon EC2, through the AWS SDK.
//!
//! What a request says and what an answer means are pure functions, tested with tables; the shells around them only call, page
//! and hand over. Nothing that the planner asks for does I/O.
//!
//! - [`crate::cloud::ec2::aws::client`], [`crate::cloud::ec2::aws::rate_limit`], [`crate::cloud::ec2::aws::errors`], [`crate::cloud::ec2::aws::batcher`]: the calls themselves.
//! - [`crate::cloud::ec2::node_class::resolve`]: what a node class comes to ([`crate::cloud::ec2::node_class::subnets`], [`crate::cloud::ec2::node_class::security_groups`], [`crate::cloud::ec2::node_class::images`] and [`crate::cloud::ec2::node_class::ami_alias`], [`crate::cloud::ec2::node_class::instance_profiles`],
//!   [`crate::cloud::ec2::node_class::placement_group`], [`crate::cloud::ec2::node_class::capacity_reservations`]), and [`crate::cloud::ec2::launch::dry_run`], whether EC2 would launch it (by a [`crate::cloud::ec2::launch::dry_run_type`]).
//! - [`launch`]: the NodeClaims of a group become instances ([`crate::cloud::ec2::launch::group_batch`], [`crate::cloud::ec2::launch::idempotency`], [`crate::cloud::ec2::launch::select`], [`crate::cloud::ec2::launch::select_reserved`], [`crate::cloud::ec2::launch::request`],
//!   [`crate::cloud::ec2::launch::templates::spec`], [`crate::cloud::ec2::launch::templates::store`], [`crate::cloud::ec2::launch::create_fleet`]), and what that teaches ([`crate::cloud::ec2::offerings::unavailable`],
//!   [`crate::cloud::ec2::offerings::reservation_counts`]). [`crate::cloud::ec2::launch::templates::recent`], [`crate::cloud::ec2::launch::templates::prewarm`]: templates are there before the next launch asks.
//! - [`crate::cloud::ec2::instances::describe`], [`crate::cloud::ec2::instances::tagging`]: describing, listing, terminating, tagging.
//! - [`crate::cloud::ec2::offerings::region`]: what can be bought ([`crate::cloud::ec2::offerings::instance_types`], [`crate::cloud::ec2::offerings::prices`], [`crate::cloud::ec2::offerings::spot_prices`], [`crate::cloud::ec2::offerings::placement_scores`], [`crate::cloud::ec2::offerings::class_offerings`]), kept fresh by
//!   [`crate::cloud::ec2::offerings::refresh`]; [`crate::cloud::ec2::offerings::discovered_memory`]: what nodes showed of it.
//! - [`crate::cloud::ec2::interruption::queue`], [`crate::cloud::ec2::interruption::messages`], [`crate::cloud::ec2::instances::status_checks`]: what EC2 tells of instances by itself; [`crate::cloud::ec2::node_class::drift`]: whether they still are what
//!   their class comes to. [`crate::cloud::ec2::offerings::zonal_shift`]: zones to keep out of.
//! - [`crate::cloud::ec2::bootstrap::user_data`], [`crate::cloud::ec2::bootstrap::kubelet_validation`]: what instances are told at boot.
//! - [`crate::cloud::ec2::observability::metrics`], [`crate::cloud::ec2::observability::degraded_apis`]: what is published of all this, and what people are told of.
//! - [`preflight`]: whether an account is fit for all this, without changing anything in it.

pub mod aws;
pub mod bootstrap;
pub mod instances;
pub mod interruption;
pub mod launch;
pub mod node_class;
pub mod observability;
pub mod offerings;
pub mod preflight;
pub mod provider;

use std::time::Duration;

pub use crate::cloud::ec2::aws::client::Clients;
pub use crate::cloud::ec2::observability::metrics::publish;
pub use crate::cloud::ec2::provider::{Ec2Provider, StartError};

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

/// Milliseconds since the epoch.
fn now_ms() -> i64 {
    k8s_openapi::jiff::Timestamp::now().as_millisecond()
}

#[cfg(test)]
mod live_tests;
