//! Improvement of a complete plan: cheaper columns, local search over purchased nodes, repair of topology spread, host preferences.

pub mod host_preferences;
pub mod local_search;
pub mod merge;
pub mod right_size;
pub mod spread_repair;
