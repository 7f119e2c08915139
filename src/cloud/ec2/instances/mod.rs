//! Instances: describe, list, terminate, tag, and their status checks.

pub mod describe;
pub mod status_checks;
pub mod store;
pub mod tagging;
