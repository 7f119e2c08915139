//! The problem: pods, nodes, NodePools and volumes, read once from Kubernetes objects into plain data.

pub mod default_spread;
pub mod intern;
pub mod node_match;
pub mod pool;
pub mod problem;
pub mod volumes;
