//! TODO-DOC cloud::ec2::instances

pub mod describe;
pub mod status_checks;
pub mod tagging;
