//! Termination of a node: which pods a drain waits for, evicts or deletes, and when it must be over.

pub mod deadlines;
pub mod detachment;
pub mod drain_order;
pub mod drain_report;
