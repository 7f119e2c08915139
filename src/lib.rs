//! Stowage plans where every pod goes, buys exactly the EC2 nodes that plan needs, and makes kube-scheduler follow it.
//!
//! Rooms, and the only direction imports may take:
//! [`cli`], [`controllers`], [`server`] → [`cloud`], [`crate::state`] → [`crate::planner`], [`crate::decisions::disruption`], [`crate::webhook`],
//! [`extender`] → [`api`]. [`telemetry`] may be used by every room above the pure ones.

pub mod api;
pub mod cli;
pub mod cloud;
pub mod controllers;
pub mod decisions;
pub mod extender;
pub mod model;
pub mod planner;
pub mod server;
pub mod state;
pub mod telemetry;
pub mod webhook;
