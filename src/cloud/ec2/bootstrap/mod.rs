//! User data of instances by AMI family, and validation of the kubelet configuration.

pub mod kubelet_validation;
pub mod user_data;
