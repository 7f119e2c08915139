//! The columns of the covering problem: one per NodePool variant, instance type, zone and capacity type, and sets of them.

pub mod bitset;
pub mod daemons;
pub mod dims;
pub mod relevant_pools;
pub mod sets;
pub mod table;
pub mod variants;
