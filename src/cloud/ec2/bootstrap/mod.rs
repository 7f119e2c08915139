//! TODO-DOC cloud::ec2::bootstrap

pub mod kubelet_validation;
pub mod user_data;
