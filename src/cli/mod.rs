//! The command line: one module per subcommand.

pub mod args;
pub mod aws;
mod cluster_access;
pub mod controller;
pub mod manifests;
pub mod output;
pub mod page;
pub mod planning;
pub mod preflight;
pub mod simulate;

use std::io::Write;

use clap::{Parser, Subcommand};

/// Just-in-time node autoscaler for Kubernetes on EC2: plans the placement of every pod and purchases the nodes for it.
#[derive(Debug, Parser)]
#[command(name = "stowage", version, about, max_term_width = 120)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the service: webhook, extender, provisioner, reconcilers.
    Controller(Box<controller::ControllerArgs>),
    /// Plan offline: print the nodes to buy for the given pods, and the reasons for unschedulable pods.
    Simulate(Box<simulate::SimulateArgs>),
    /// Check AWS permissions, quotas and node classes before using `--cloud ec2`; prints a remediation per finding.
    Preflight(Box<preflight::PreflightArgs>),
}

/// Runs one subcommand. Returns the exit code.
///
/// # Errors
/// The failure of the subcommand, as a message for the user.
pub fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<u8> {
    match &cli.command {
        Command::Controller(args) => controller::run(args),
        Command::Simulate(args) => simulate::run(args, out),
        Command::Preflight(args) => preflight::run(args, out),
    }
}
