//! The pure core: what to buy and what goes where. No clock, no client, no randomness that isn't passed in.
//!
//! [`crate::planner::output::plan`] reads top to bottom: pods become groups ([`crate::planner::groups::group`]), groups are divided over topology domains
//! ([`crate::planner::groups::topology`]), fill what exists ([`crate::planner::groups::existing`]), and the rest is bought at dual prices ([`crate::planner::pack::strategy`], [`crate::planner::state::demand`],
//! [`crate::planner::pricing::duals`]) and bettered ([`crate::planner::improve::local_search`]); a few pods are divided in the best way there is ([`crate::planner::pack::exact`]).
//! Last, what prefers to be apart is spread over what was bought anyway ([`crate::planner::improve::host_preferences`]). Work grows with groups times offerings, not with pods times nodes.

pub mod columns;
pub mod groups;
pub mod improve;
pub mod input;
pub mod output;
pub mod pack;
pub mod pricing;
pub mod solve;
pub mod state;

pub use crate::planner::input::intern::{Interner, PodError};
pub use crate::planner::input::pool::PoolError;
pub use crate::planner::solve::plan;

#[cfg(test)]
mod tests;
