//! Watched objects as tables, and the planner's problem built from them. Only [`watch`] talks to the API server. No policy
//! decision is made here: those are in [`crate::decisions`], which is above this layer.

pub mod attachments;
pub mod change_log;
pub mod claim_index;
pub mod claim_offers;
pub mod cluster;
pub mod daemon_sets;
pub mod deleted_uids;
pub mod kinds;
pub mod node_health;
pub mod node_state;
pub mod object_ext;
pub mod plan_index;
pub mod plan_record;
pub mod pod_budgets;
pub mod pod_progress;
pub mod pod_waits;
pub mod pods;
pub mod pool_types;
pub mod protections;
pub mod schedulers;
pub mod snapshot;
pub mod snapshot_cache;
pub mod surging_pods;
pub mod tables;
pub mod volume_tables;
pub mod watch;
pub mod watch_signs;

pub use crate::state::cluster::Cluster;
pub use crate::state::pods::PodRecord;
pub use crate::state::tables::ClusterState;
