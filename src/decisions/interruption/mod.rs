//! Involuntary disruption: the response to interruption messages and to unhealthy instances.

pub mod confirmation;
pub mod health_response;
pub mod response;
