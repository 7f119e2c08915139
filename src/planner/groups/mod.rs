//! Pods that no rule distinguishes, as groups, and the assignment of groups to topology domains.

pub mod existing;
pub mod group;
pub mod selectors;
pub mod topology;
