//! TODO-DOC controllers::interruption

pub mod queue;
pub mod status_checks;
