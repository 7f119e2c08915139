//! TODO-DOC planner::improve

pub mod host_preferences;
pub mod local_search;
pub mod spread_repair;
