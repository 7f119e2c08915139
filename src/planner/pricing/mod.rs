//! The LP relaxation: dual prices of resources, and the lower bound on plan cost. Nothing is purchased here.

pub mod duals;
pub mod lower_bound;
pub mod reach;
pub mod subproblem;
