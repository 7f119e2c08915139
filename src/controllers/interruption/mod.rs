//! Involuntary disruption: messages of the interruption queue and failed status checks.

pub mod queue;
pub mod unhealthy_instances;
