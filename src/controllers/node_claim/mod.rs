//! NodeClaims from creation to deletion: launch, registration, initialization, drift, expiration, drain, garbage collection.

pub mod capacity_reservations;
pub mod claim_metrics;
pub mod consistency;
pub mod creation;
pub mod detachment;
pub mod drain;
pub mod drained;
pub mod drift;
pub mod expiration;
pub mod garbage_collection;
pub mod instance_tags;
pub mod launch;
pub mod lifecycle;
pub mod price_annotations;
pub mod registration;
pub mod repair;
pub mod step_error;
pub mod termination;
