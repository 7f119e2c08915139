//! What all tasks of the process share: the clock, locks and heartbeats, metrics.
//!
//! [`sync`] may be used by all layers that run; [`clock`] and [`telemetry`] by the layers with I/O only (`tests/architecture.rs`).

pub mod clock;
pub mod sync;
pub mod telemetry;
