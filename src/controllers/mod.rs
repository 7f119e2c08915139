//! The reconcilers: each gathers what it needs from [`crate::state`], asks a pure function what to do, and does it.
//! Decisions belong in the pure rooms; what is here may fail half-way at any line and must go on from there.

pub mod cloud_sync;
pub mod context;
pub mod disruption;
pub mod enforcement;
pub mod interruption;
pub mod leader;
pub mod node_claim;
pub mod node_class;
pub mod node_pool;
pub mod provisioning;

pub use crate::controllers::context::Context;
