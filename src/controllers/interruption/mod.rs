//! Involuntary disruption: messages of the interruption queue and failed status checks; and the deletion of marked claims.

pub mod departure;
pub mod queue;
pub mod status_checks;
