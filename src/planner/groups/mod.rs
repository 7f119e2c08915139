//! Groups of pods that no rule distinguishes, the nodes that exist, and the assignment of groups to topology domains.

pub mod existing_nodes;
pub mod group;
pub mod host_rules;
pub mod pod_selectors;
pub mod topology;
