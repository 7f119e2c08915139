//! The data that all stages of the solver share: remaining demand, purchased nodes, NodePool budgets.

pub mod budget;
pub mod demand;
pub mod plan_state;
