//! `stowage controller`: the service. Settings with an equivalent in Karpenter have Karpenter's flag and variable.

pub mod api_calls;
pub mod arguments;
pub mod clients;
pub mod cloud_setup;
pub mod lead;
mod log_lines;
pub mod logging;
pub mod serve;
pub mod start_cloud;

use std::time::Duration;

use anyhow::Context as _;

pub use crate::cli::controller::arguments::ControllerArgs;
use crate::cli::controller::logging::LogControl;
use crate::cli::controller::serve::serve;

/// Exit code of a service that ended because of an error.
const FAILED: u8 = 2;

/// Runs the service until it receives a stop signal or loses its lease. Returns the exit code: what ended the service, such as a setting, file
/// or address that can't be used, or a lost lease, is in the log, in its format.
///
/// # Errors
/// No runtime could be started.
pub fn run(args: &ControllerArgs) -> anyhow::Result<u8> {
    let logs = LogControl::install(args.log_level, args.log_format, &args.log_output_paths);
    // An already installed provider stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting the runtime")?;
    let own =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("election").enable_all().build();
    let election = own.context("starting the runtime of the leader election")?;
    let result = runtime.block_on(serve(args, logs, election.handle()));
    // Watches and reconcilers are not awaited: all their state is in the API server and the cloud.
    runtime.shutdown_timeout(Duration::from_secs(1));
    election.shutdown_background();
    Ok(match result {
        Ok(()) => {
            tracing::info!("stopped");
            0
        }
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "ended by an error");
            FAILED
        }
    })
}
