//! The command line: one file for each subcommand.

pub mod aws;
pub mod controller;
pub mod manifests;
pub mod output;
pub mod page;
pub mod planning;
pub mod preflight;
pub mod simulate;

use std::io::Write;

use clap::{Parser, Subcommand};

/// Plans where every pod goes, buys exactly the EC2 nodes that plan needs, and makes kube-scheduler follow it.
#[derive(Debug, Parser)]
#[command(name = "stowage", version, about, max_term_width = 120)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the service: webhook, extender, provisioner, reconcilers.
    Controller(Box<controller::ControllerArgs>),
    /// Plan offline: what would be bought for these pods, and why.
    Simulate(Box<simulate::SimulateArgs>),
    /// Check that a region, a role and a cluster are fit for EC2: what is right, what is wrong, the fix.
    Preflight(Box<preflight::PreflightArgs>),
}

/// Runs one subcommand. Returns the exit code.
///
/// # Errors
/// What the subcommand could not do, for a person to read.
pub fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<u8> {
    match &cli.command {
        Command::Controller(args) => controller::run(args).map(|()| 0),
        Command::Simulate(args) => simulate::run(args, out),
        Command::Preflight(args) => preflight::run(args, out),
    }
}
