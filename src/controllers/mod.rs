//! The controllers: each gathers a snapshot of [`crate::state`], calls a pure function that decides what to do, and does it.
//! Policy belongs in [`crate::decisions`]: a file of the same name there decides what the file here carries out. Every write may be the last one before a restart: the next pass continues from there.

pub mod caps;
pub mod cloud_sync;
pub mod condition_metrics;
pub mod condition_writer;
pub mod confirmed_drains;
pub mod context;
pub mod debug_state;
pub mod deletion;
pub mod derived_state;
pub mod disruption;
pub mod emergency_stop;
pub mod enforcement;
pub mod event_queue;
pub mod event_recorder;
pub mod evictions;
pub mod gauges;
pub mod interruption;
pub mod leader;
pub mod node_claim;
pub mod node_class;
pub mod node_pool;
pub mod node_series;
pub mod object_events;
pub mod pod_series;
pub mod preset;
pub mod provisioning;
pub mod pure_parts;
pub mod retry_policy;
pub mod run_loop;
pub mod static_pools;
pub mod supervise;
pub mod unsupported_kinds;
pub mod vitals;

pub use crate::controllers::context::Context;
