//! Decisions about the cluster as pure functions of a snapshot: no clock, no client, no lock.

pub mod disruption;
