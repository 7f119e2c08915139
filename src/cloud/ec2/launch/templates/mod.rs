//! TODO-DOC cloud::ec2::launch::templates

pub mod prewarm;
pub mod recent;
pub mod spec;
pub mod store;
