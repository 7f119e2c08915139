//! The AWS calls themselves: clients, rate limits, error classes, batching of calls and filters of Describe calls.

pub mod batcher;
pub mod client;
pub mod errors;
pub mod filters;
pub(crate) mod http_client;
pub mod rate_limit;
pub(crate) mod rate_limited_http;
