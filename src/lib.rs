//! Stowage plans where every pod goes, buys exactly the EC2 nodes that plan needs, and makes kube-scheduler follow it.
//!
//! Rooms, and the only direction imports may take:
//! [`cli`], [`controllers`], [`server`] → [`cloud`], [`cluster`] → [`scheduling`], [`disruption`], [`admission`],
//! [`extender`] → [`api`]. [`telemetry`] may be used by every room above the pure ones.

pub mod admission;
pub mod api;
pub mod cli;
pub mod cloud;
pub mod cluster;
pub mod controllers;
pub mod disruption;
pub mod extender;
pub mod scheduling;
pub mod server;
pub mod telemetry;
