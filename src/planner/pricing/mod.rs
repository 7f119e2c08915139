//! TODO-DOC planner::pricing

pub mod duals;
pub mod lower_bound;
