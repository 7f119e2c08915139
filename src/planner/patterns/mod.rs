//! Column generation over node patterns: pods are placed whole. Gives small and medium demands values of whole pods, a bound of whole pods,
//! and nodes by diving.

pub mod branch_and_bound;
pub mod improve;
pub mod knapsack;
pub mod master;
pub mod neighborhoods;
pub mod node_kinds;
pub mod pattern_search;
pub mod proof;

#[cfg(test)]
mod tests;
