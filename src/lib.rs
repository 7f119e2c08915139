//! Stowage plans where every pod goes, buys exactly the EC2 nodes that plan needs, and makes kube-scheduler follow it.
//!
//! Imports point downwards only. The lowest layers and the cloud are crates of their own, in folders of `src/`; `tests/architecture.rs`
//! enforces the layers of this crate, and that no two modules import each other.
//!
//! | layer | crates and modules |
//! |---|---|
//! | assembly | [`cli`] |
//! | I/O | [`controllers`], [`server`] |
//! | cloud, decisions | [`stowage_cloud`], [`decisions`] |
//! | watched state | [`state`] |
//! | pure verdicts | [`stowage_planner`], [`webhook`], [`extender`] |
//! | Kubernetes objects | [`stowage_api`] |
//! | domain types, clock, locks, metrics | [`stowage_model`], [`stowage_runtime`] |
//!
//! Only [`cli`] and [`parts`] are public; everything else is private, so that the compiler finds unused code. In the other crates,
//! `tests/architecture.rs` does.
//!
//! [`stowage_runtime::telemetry`] and [`stowage_runtime::clock`] may be used by `cli`, `controllers`, `server` and the cloud only;
//! [`stowage_runtime::sync`] by all modules of this crate, too.

pub mod cli;
mod controllers;
mod decisions;
mod extender;
mod server;
mod state;
#[cfg(test)]
mod test_support;
mod webhook;

/// What the integration tests and benches of this package use of it.
#[doc(hidden)]
pub mod parts {
    pub use crate::controllers::condition_metrics::text as condition_series;
    pub use crate::controllers::derived_state::DerivedState;
    pub use crate::controllers::node_series::text as node_series;
    pub use crate::controllers::pod_series::text as pod_series;
    pub use crate::controllers::pure_parts::{PART_NAMES, PureParts};
    pub use crate::decisions::disruption::consolidation::{Consolidation, Decision, Memory, Request};
    pub use crate::decisions::disruption::simulated_removal::Simulator;
    pub use crate::extender::{FilterArgs, Hold, NodeRoom, View, ViewInput, filter, prioritize};
    pub use crate::server::{AppState, BoundAddrs, Bounds, Limits, Server, ServerConfig, ServerError, Shutdown};
    pub use crate::state::pool_types::{InstanceTypes, ReadyPool};
    pub use crate::state::snapshot::SnapshotRequest;
    pub use crate::state::{Cluster, ClusterState};
    pub use crate::webhook::rule_list::RULES;
}
