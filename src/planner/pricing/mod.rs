//! The linear relaxation: dual prices of resources, and the lower bound on plan cost.

pub mod duals;
pub mod lower_bound;
