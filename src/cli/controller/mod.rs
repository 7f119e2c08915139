//! `stowage controller`: the service. Settings with an equivalent in Karpenter have Karpenter's flag and variable.

pub mod api_calls;
pub mod arguments;
pub mod clients;
pub mod cloud;
pub mod lead;
pub mod logging;
pub mod serve;
pub mod start_cloud;

use std::time::Duration;

use anyhow::Context as _;

pub use crate::cli::controller::arguments::ControllerArgs;
use crate::cli::controller::logging::LogControl;
use crate::cli::controller::serve::serve;

/// Runs the service until it receives a stop signal or loses its lease.
///
/// # Errors
/// A setting, file or address that can't be used; a lost lease.
pub fn run(args: &ControllerArgs) -> anyhow::Result<()> {
    let logs = LogControl::install(args.log_level, args.log_format);
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
    result
}
