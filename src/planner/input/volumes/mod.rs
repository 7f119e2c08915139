//! Volumes: the nodes that a pod's claims allow, and how many volumes of a driver a node can attach.
//!
//! Before planning, `resolve` translates claims into node terms and one resource per driver. Terms of volumes are separate from the
//! pod's own terms, since kube-scheduler ignores them when it counts the domains of a spread constraint.

pub mod capacity;
pub mod conjunction;
pub mod exclusive;
pub mod free;
pub mod needs;
pub mod objects;
pub mod resolve_volumes;
pub mod shared;
