//! `/debug/state`: what a replica believes. A bounded copy ([`snapshot`]) is gathered from the live state ([`sources`]) and written as a
//! document ([`document`]), by a pure function.

pub mod document;
pub mod snapshot;
pub mod sources;
