//! The result: a rehearsal of the binding, choices of each new node, the plan, which of its nodes depend on each other, why a pod is unschedulable, and feedback to the next solve.

pub mod assemble;
pub mod choices;
pub mod collect_feedback;
pub mod dependencies;
pub mod explain;
pub mod new_nodes;
pub mod plan;
pub mod pod_cursor;
pub mod rehearsal;
pub mod restore;
