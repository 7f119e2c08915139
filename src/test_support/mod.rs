//! Shared fixtures of test modules: a Kubernetes API server in memory, a scripted cloud, and a harness that runs one write path under
//! every failure. No assertion about a single controller belongs here.

mod cluster_state;
pub(crate) mod consolidation_world;
pub mod failures;
mod fuzz;
pub(crate) mod history;
pub mod kubernetes;
pub mod scripted_cloud;
pub(crate) mod small_cluster;

pub(crate) use cluster_state::state_with_planned_pod;
