//! TODO-DOC controllers::disruption

pub mod consolidation;
pub mod drift_replacement;
pub mod run;
pub mod simulate;
