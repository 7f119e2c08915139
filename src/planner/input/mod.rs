//! TODO-DOC planner::input

pub mod default_spread;
pub mod intern;
pub mod pool;
pub mod problem;
pub mod volumes;
