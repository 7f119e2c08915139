//! Voluntary disruption: empty, drifted and underutilized nodes.

pub mod consolidation;
pub mod drift_replacement;
pub mod run;
pub mod simulate;
