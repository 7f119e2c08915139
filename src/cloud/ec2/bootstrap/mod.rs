//! What an instance gets at boot: user data by AMI family, and validation of the kubelet configuration.

pub mod kubelet_validation;
pub mod user_data;
