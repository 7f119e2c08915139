//! TODO-DOC planner::output

pub mod choices;
pub mod explain;
pub mod plan;
pub mod product;
