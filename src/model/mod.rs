//! TODO-DOC model

pub mod labels;
pub mod offering;
pub mod pod_class;
pub mod quantity;
pub mod requirement;
pub mod resources;
