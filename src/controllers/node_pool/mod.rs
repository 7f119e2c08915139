//! NodePools: status, drift hash, and events about zonal shifts.

pub mod pool_hash;
pub mod status;
pub mod zonal_shift;
