//! TODO-DOC decisions

pub mod disruption;
