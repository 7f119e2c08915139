//! EC2NodeClasses: status, finalizer, drift hash, and events about optional AWS APIs.

pub mod degraded_apis;
pub mod reconcile;
