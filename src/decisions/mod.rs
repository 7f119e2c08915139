//! Policy decisions about the cluster, as pure functions of the watched state and the time: no clock, no client, no lock. The
//! controllers gather the inputs and carry out the results.

pub mod condition_transitions;
pub mod demand;
pub mod disruption;
pub mod gauges;
pub mod holds;
pub mod interruption;
pub mod last_decisions;
pub mod lifecycle;
pub mod node_prices;
pub mod node_usage;
pub mod placement;
pub mod pod_ref;
pub mod provisioning;
pub mod rate_cap;
pub mod staleness;
pub mod static_pools;
pub mod termination;
