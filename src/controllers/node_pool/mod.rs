//! NodePools: status, drift hash, and events about zonal shifts.

pub mod no_instance_types;
pub mod status;
pub mod zonal_shift;
