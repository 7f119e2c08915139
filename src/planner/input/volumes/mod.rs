//! Volumes: where a pod's claims let it run, and how many volumes of a driver a node can attach.
//!
//! Before anything is planned, `resolve` turns claims into what the rest of the core understands: node terms and a
//! resource per driver. Terms of volumes stay apart from the pod's own, since kube-scheduler does not look at them when
//! it counts the domains of a spread constraint.

pub mod capacity;
pub mod conjunction;
pub mod exclusive;
pub mod free;
pub mod needs;
pub mod objects;
pub mod resolve;
