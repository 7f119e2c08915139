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

mod columns;
mod groups;
mod improve;
mod input;
mod output;
mod pack;
mod patterns;
mod pricing;
mod solve;
mod state;
#[cfg(test)]
mod test_support;
#[cfg(test)]
mod tests;

pub use crate::columns::table::ColumnCache;
pub use crate::input::default_spread::{DefaultSpread, Services};
pub use crate::input::intern::{Interner, PodError};
pub use crate::input::node::{NodeState, Tenure};
pub use crate::input::pod::{Daemon, Labels, NodePods, PodEntry};
pub use crate::input::pool::{Pool, PoolError};
pub use crate::input::problem::Problem;
pub use crate::input::settings::{MinValuesPolicy, NodeSizes, PlanSettings, PreferencePolicy};
pub use crate::input::terms::selector;
pub use crate::output::dependencies::dependent_parts;
pub use crate::output::plan::{Choice, ExistingNodePlacement, Plan, PlannedNode, Unschedulable};
pub use crate::solve::{Effort, least_cost, plan, plan_with};

/// Claims, volumes and storage classes, and what they allow.
pub mod volumes {
    pub use crate::input::volumes::objects::{Claim, StorageClass, Volume, Volumes, attach_limits};
}
