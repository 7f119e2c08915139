//! Stowage plans where every pod goes, buys exactly the EC2 nodes that plan needs, and makes kube-scheduler follow it.
//!
//! Imports point downwards only; `tests/architecture.rs` enforces the layers, and that no two modules import each other.
//!
//! | layer | modules |
//! |---|---|
//! | assembly | [`cli`] |
//! | I/O | [`controllers`], [`server`] |
//! | cloud, decisions | [`cloud`], [`decisions`] |
//! | watched state | [`state`] |
//! | pure verdicts | [`planner`], [`webhook`], [`extender`] |
//! | Kubernetes objects | [`api`] |
//! | domain types | [`model`] |
//!
//! [`telemetry`] and [`clock`] may be used by `cli`, `controllers`, `server` and `cloud` only; [`sync`] by all.

pub mod api;
pub mod cli;
pub mod clock;
pub mod cloud;
pub mod controllers;
pub mod decisions;
pub mod extender;
pub mod model;
pub mod planner;
pub mod server;
pub mod state;
pub mod sync;
pub mod telemetry;
#[cfg(test)]
mod test_support;
pub mod webhook;
