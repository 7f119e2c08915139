//! The pure core: what to buy and what goes where. No clock, no client, no randomness that isn't passed in.
//!
//! [`plan`] reads top to bottom: pods become groups ([`groups`]), groups are divided over topology domains
//! ([`topology`]), fill what exists ([`existing`]), and the rest is bought at dual prices ([`pack`], [`stock`],
//! [`duals`]) and bettered ([`improve`]); a few pods are divided in the best way there is ([`exact`]).
//! Last, what prefers to be apart is spread over what was bought anyway ([`evenly`]). Work grows with groups times offerings, not with pods times nodes.

mod bits;
mod bound;
mod budget;
pub mod class;
pub mod defaults;
mod dims;
mod duals;
mod evenly;
mod exact;
mod existing;
mod finish;
mod groups;
mod improve;
pub mod intern;
mod level;
mod market;
pub mod offering;
mod pack;
pub mod plan;
pub mod pool;
pub mod problem;
mod product;
pub mod quantity;
mod reasons;
pub mod requirement;
mod reserved;
pub mod resources;
mod selectors;
mod solve;
mod stock;
#[cfg(test)]
mod tests;
mod topology;
mod universe;
mod variant;
pub mod volumes;

pub use intern::{Interner, PodError};
pub use pool::PoolError;
pub use solve::plan;
