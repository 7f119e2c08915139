//! Instances: describe, list, terminate, tag, and their status checks and spot requests.

pub mod describe;
pub mod instance_store;
pub mod spot_requests;
pub mod status_checks;
pub mod tagging;
