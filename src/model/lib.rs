//! Domain types that carry their units: quantities, resources, requirements, offerings, pod classes, time. No I/O.

pub mod annotations;
pub mod draw;
pub mod drift_reason;
pub mod events;
pub mod instance;
pub mod instance_health;
pub mod interruption;
pub mod labels;
pub mod launch_timing;
pub mod limit_range;
pub mod offering;
pub mod pause;
pub mod pod_class;
pub mod pod_requests;
pub mod quantity;
pub mod requirement;
pub mod reservation;
pub mod resources;
pub mod time;
pub mod units;
