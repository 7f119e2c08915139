//! TODO-DOC controllers::node_pool

pub mod status;
pub mod zonal_shift;
