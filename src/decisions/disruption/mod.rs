//! What may be taken away: pure decisions over plain data. No clock, no client.

pub mod budget;
pub mod drift_order;
pub mod emptiness;
