//! The pure core: what to buy and what goes where. No clock, no client, no randomness that isn't passed in.

pub mod class;
pub mod offering;
pub mod plan;
pub mod problem;
pub mod resources;
