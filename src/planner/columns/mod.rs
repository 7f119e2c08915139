//! TODO-DOC planner::columns

pub mod bitset;
pub mod dims;
pub mod sets;
pub mod table;
pub mod variants;
