//! Typed Kubernetes objects: `karpenter.sh/v1` NodePool and NodeClaim, `karpenter.k8s.aws/v1` EC2NodeClass, and the rules that
//! depend on the object alone: validation, drift hashes, conditions.
//! Logic that depends on a cluster, a clock or a cloud does not belong here.

pub mod conditions;
#[cfg(test)]
mod crds;
pub mod duration;
pub mod go_duration;
pub mod hash;
pub mod launch_group;
pub mod node_claim;
pub mod node_class;
pub mod node_pool;
mod parse_requirements;
pub mod schema;
pub mod validation;

pub use crate::node_claim::{NodeClaim, NodeClaimSpec};
pub use crate::node_class::{Ec2NodeClass, Ec2NodeClassSpec, Ec2NodeClassStatus};
pub use crate::node_pool::{NodeClassRef, NodePool, NodePoolSpec, Requirement};
pub use crate::parse_requirements::parse_requirements;
