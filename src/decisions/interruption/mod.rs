//! Involuntary disruption: the response to interruption messages and to unhealthy instances.

pub mod health_response;
pub mod response;
