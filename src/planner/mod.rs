//! The pure core: decides which nodes to purchase and the placement of every pod. No clock, no client, no randomness except the input.
//!
//! [`solve`] is the list of stages. Folders import downwards only:
//!
//! | folder | content |
//! |---|---|
//! | [`output`] | choices of each new node, the plan, reasons for unschedulable pods |
//! | [`improve`] | right-sizing, ruin-and-recreate local search, repair of topology spread, host preferences |
//! | [`patterns`] | column generation over node patterns: whole pods, for small and medium demands |
//! | [`pack`] | bin packing: existing nodes, reservations, purchases at dual prices, small instances exactly |
//! | [`pricing`] | covering LP: dual prices and the lower bound |
//! | [`state`] | the plan under construction: remaining demand, purchased nodes, budgets |
//! | [`groups`] | pods as groups with counts; their assignment to topology domains |
//! | [`columns`] | purchasable nodes as columns, and interned sets of columns |
//! | [`input`] | the problem as plain data |
//!
//! Work grows with groups times offerings, not with pods times nodes.

pub mod columns;
pub mod groups;
pub mod improve;
pub mod input;
pub mod output;
pub mod pack;
pub mod patterns;
pub mod pricing;
pub mod solve;
pub mod state;

pub use crate::planner::input::intern::PodError;
pub use crate::planner::solve::{Effort, plan, plan_with};

#[cfg(test)]
pub(crate) mod tests;
