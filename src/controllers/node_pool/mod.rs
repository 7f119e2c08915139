//! NodePools: status, drift hash, and events about zonal shifts.

pub mod status;
pub mod zonal_shift;
