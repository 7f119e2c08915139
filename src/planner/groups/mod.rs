//! TODO-DOC planner::groups

pub mod group;
pub mod selectors;
pub mod topology;
