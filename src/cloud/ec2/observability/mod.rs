//! TODO-DOC cloud::ec2::observability

pub mod degraded_apis;
pub mod metrics;
