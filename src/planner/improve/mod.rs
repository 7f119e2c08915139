//! Improvements of a complete plan: local search over purchased nodes, host preferences, repair of topology spread.

pub mod host_preferences;
pub mod local_search;
pub mod spread_repair;
