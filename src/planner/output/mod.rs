//! The result: acceptable instance types per node, the plan, and why a pod is unschedulable.

pub mod choices;
pub mod explain;
pub mod plan;
pub mod product;
pub mod restore;
