//! The problem: pods, nodes, NodePools and volumes, parsed once from Kubernetes objects into plain data. Nothing of the later
//! stages may enter.

pub mod default_spread;
pub mod intern;
mod intern_table;
pub mod node;
pub mod pod;
pub mod pod_rules;
pub mod pool;
pub mod problem;
pub mod service_spread;
pub mod settings;
pub mod terms;
pub mod volumes;
