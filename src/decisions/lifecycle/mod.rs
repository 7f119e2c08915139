//! The life of a NodeClaim: its next step, initialization, drift, expiration, capacity reservations, garbage collection.

pub mod capacity_reservations;
pub mod claim_queue;
pub mod consistency;
pub mod drift;
pub mod drift_hash;
pub mod expiration;
pub mod garbage;
pub mod initialization;
pub mod instance_checks;
pub mod next_step;
pub mod node_repair;
pub mod registration_health;
