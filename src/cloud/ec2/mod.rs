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
//! - [`crate::cloud::ec2::observability::metrics`], [`crate::cloud::ec2::degraded_apis`]: what is published of all this, and what people are told of.
//! - [`preflight`]: whether an account is fit for all this, without changing anything in it.

pub mod aws;
pub mod boot_image;
pub mod bootstrap;
pub mod degraded_apis;
pub mod instances;
pub mod interruption;
pub mod launch;
pub mod node_class;
pub mod observability;
pub mod offerings;
pub mod options;
pub mod placement_group;
pub mod preflight;
pub mod provider;
pub mod tags;

pub use crate::cloud::ec2::aws::client::Clients;
pub use crate::cloud::ec2::observability::metrics::publish;
pub use crate::cloud::ec2::options::Options;
pub use crate::cloud::ec2::provider::Ec2Provider;

#[cfg(test)]
mod live_tests;
