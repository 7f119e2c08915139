//! `/debug/state`: what a replica believes. The [`document`] is copied, within bounds, from the live state ([`sources`]).

pub mod document;
pub mod sources;
