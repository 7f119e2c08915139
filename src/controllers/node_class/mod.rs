//! TODO-DOC controllers::node_class

pub mod degraded_apis;
pub mod reconcile;
