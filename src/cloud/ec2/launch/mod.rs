//! Launches: the NodeClaims of a launch group become instances by CreateFleet calls that are safe to repeat. Also the dry runs that
//! validate a node class. Reads the stores of offerings, node classes and instances; knows neither the provider nor the queue.

pub mod batch;
pub mod capacity_feedback;
pub mod class_dry_run;
pub mod create_fleet;
pub mod dry_run_instance;
pub mod dry_run_type;
pub mod idempotency;
pub mod launch_context;
pub mod launch_errors;
pub mod launcher;
pub mod prepare;
pub mod request;
pub mod select;
pub mod select_reserved;
pub mod templates;
