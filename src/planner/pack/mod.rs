//! TODO-DOC planner::pack

pub mod budget;
pub mod demand;
pub mod exact;
pub mod existing;
pub mod reserved;
pub mod strategy;
