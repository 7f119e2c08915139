//! TODO-DOC cloud::ec2::aws

pub mod batcher;
pub mod client;
pub mod errors;
pub mod filters;
pub mod rate_limit;
