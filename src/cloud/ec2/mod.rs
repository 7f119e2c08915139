//! EC2 for real: what a node class means in EC2's terms, and the calls that make it so.

pub mod kubelet;
pub mod user_data;
