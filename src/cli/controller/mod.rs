//! `stowage controller`: the service. Settings with an equivalent in Karpenter have Karpenter's flag and variable.

pub mod api_calls;
pub mod arguments;
pub mod clients;
pub mod cloud;
pub mod lead;
pub mod serve;
pub mod start_cloud;

use std::time::Duration;

use anyhow::Context as _;
use tracing_subscriber::EnvFilter;

pub use crate::cli::controller::arguments::ControllerArgs;
use crate::cli::controller::arguments::{LogFormat, LogLevel};
use crate::cli::controller::serve::serve;

/// Runs the service until it receives a stop signal or loses its lease.
///
/// # Errors
/// A setting, file or address that can't be used; a lost lease.
pub fn run(args: &ControllerArgs) -> anyhow::Result<()> {
    let filter = match args.log_level {
        LogLevel::Debug => "stowage=debug,info",
        LogLevel::Info => "stowage=info,warn",
        LogLevel::Warn => "warn",
        LogLevel::Error => "error",
    };
    let logs = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(filter)).with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Json => logs.json().flatten_event(true).init(),
        LogFormat::Text => logs.with_ansi(false).init(),
    }
    // An already installed provider stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting the runtime")?;
    let result = runtime.block_on(serve(args));
    // Watches and reconcilers are not awaited: all their state is in the API server and the cloud.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}
