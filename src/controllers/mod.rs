//! The reconcilers: each gathers what it needs from [`crate::cluster`], asks a pure function what to do, and does it.
//! Decisions belong in the pure rooms; what is here may fail half-way at any line and must go on from there.

pub mod batcher;
mod claim;
pub mod consolidation;
pub mod context;
pub mod degraded;
pub mod discovery;
mod disrupted;
pub mod disruption;
pub mod drain;
pub mod drift;
pub mod expiration;
pub mod garbage;
pub mod guard;
pub mod interruption;
pub mod launch;
pub mod leader;
pub mod lifecycle;
pub mod node_class;
pub mod node_pool;
pub mod placement;
pub mod provisioner;
pub mod replacement;
pub mod reservations;
pub mod simulation;
pub mod status_checks;
pub mod tagging;
pub mod view;
pub mod zonal_shift;

pub use context::Context;
