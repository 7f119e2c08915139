//! Assembly of the service: clients, watches, server and reconcilers, until the process is stopped.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use stowage_runtime::clock;
use stowage_runtime::telemetry::Metrics;
use stowage_runtime::telemetry::controllers::ControllerMetrics;
use tokio::runtime::Handle;

use crate::cli::cluster_access;
use crate::cli::controller::api_calls::ApiCalls;
use crate::cli::controller::arguments::ControllerArgs;
use crate::cli::controller::clients::{self, KubeClients};
use crate::cli::controller::lead::{TURN_LIMIT, lead};
use crate::cli::controller::logging::LogControl;
use crate::controllers::debug_state::sources::{DebugSources, Process};
use crate::controllers::derived_state::DerivedState;
use crate::controllers::enforcement::extender_view;
use crate::controllers::leader::LeaderCandidate;
use crate::controllers::supervise::supervised;
use crate::controllers::vitals;
use crate::decisions::placement::mode::PlacementMode;
use crate::server::{AppState, Server, ServerConfig, Shutdown};
use crate::state::watch;
use crate::state::watch::Watches;
use crate::state::{Cluster, ClusterState};
use crate::webhook::rule_list::Rules;

/// Name of the loop that rebuilds the extender's view.
const EXTENDER_VIEW: &str = "extender view";

/// Runs the service; `election` is the runtime of the leader election.
pub(crate) async fn serve(args: &ControllerArgs, logs: LogControl, election: &Handle) -> anyhow::Result<()> {
    let config = cluster_access::config()
        .await
        .context("no access to a cluster: set KUBECONFIG, or run in a pod with a service account")?;
    let metrics = Metrics::new().published_as(args.metric_names);
    let controller_metrics = ControllerMetrics::new(metrics.registry()).context("registering metrics")?;
    metrics.register_process().context("registering the metrics of the process")?;
    let cluster = Arc::new(Cluster::new(ClusterState::with_default_spread(args.plan.scheduler_config.clone())));
    let calls = ApiCalls { metrics: metrics.clone(), signs: Arc::clone(cluster.watch_signs()) };
    let KubeClients { reconcilers, watches } = KubeClients::new(&config, &calls)?;
    let election = {
        let _entered = election.enter();
        let lease = clients::lease(&config, &calls)?;
        let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "stowage".into());
        let identity = format!("{host}_{}_{}", std::process::id(), clock::now().0);
        let namespace = (!args.disable_leader_election).then(|| args.lease.namespace(&config.default_namespace));
        LeaderCandidate::new(lease, namespace, &args.lease.leader_election_name, identity, &metrics)
    };
    let mut state = AppState::new(metrics, clock::now);
    state.rules = Rules::without(&args.disabled_admission_rules.0);
    state.lease.clone_from(&args.lease.leader_election_name);
    state.set_leading(false);
    let state = Arc::new(state);
    let mut server_config = ServerConfig::new(&args.cert_dir);
    let at = |port| SocketAddr::new(args.bind_address, port);
    server_config.https_addr = at(args.https_port);
    server_config.client_ca.clone_from(&args.client_ca);
    server_config.extender_client_names.clone_from(&args.extender_client_names);
    server_config.webhook_client_ca.clone_from(&args.webhook_client_ca);
    server_config.webhook_client_names.clone_from(&args.webhook_client_names);
    server_config.debug_client_names.clone_from(&args.debug_client_names);
    server_config.metrics_addr = Some(at(args.metrics_port));
    server_config.health_addr = Some(at(args.health_probe_port));
    let server = Server::start(server_config, Arc::clone(&state)).await?;
    if let Some(file) = &args.address_file {
        write_addresses(file, &server)?;
    }

    let (stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(async move {
        let signal = stop_signal().await;
        tracing::info!(signal, "stop signal received, shutting down");
        let _ = stop.send(true);
    });
    let heartbeats = &state.heartbeats;
    Watches { cluster: &cluster, heartbeats, clock: clock::now }
        .start(&watches, !args.plan.scheduler_config.is_empty());
    watch::start_pause(&watches, &cluster, &config.default_namespace, move |level| logs.apply(level));
    let derived = Arc::new(DerivedState::new(args.plan_unattempted));
    let debug = Arc::new(DebugSources::new(Arc::clone(&cluster), Arc::clone(&derived)));
    {
        let (debug, replica) = (Arc::clone(&debug), Arc::downgrade(&state));
        state.debug.set_source(move || {
            let Some(state) = replica.upgrade() else { return Vec::new() };
            let now = (state.now)();
            let (leading_since, not_ready) = (state.leading_since(), state.readiness.missing(now));
            let turns = state.heartbeats.turns(Instant::now());
            debug.document(Process { version: env!("CARGO_PKG_VERSION"), leading_since, not_ready, turns }, now)
        });
    }
    if args.placement != PlacementMode::Off {
        let (cluster, derived, view) = (Arc::clone(&cluster), Arc::clone(&derived), Arc::clone(&state.view));
        let (placement, requests) = (args.placement, Arc::clone(&state.view_requests));
        let run = move || {
            let (cluster, derived, view) = (Arc::clone(&cluster), Arc::clone(&derived), Arc::clone(&view));
            extender_view::run(cluster, derived, view, placement, Arc::clone(&requests))
        };
        let run = supervised(EXTENDER_VIEW, state.metrics.loop_panics.clone(), run);
        tokio::spawn(heartbeats.run(EXTENDER_VIEW, TURN_LIMIT, run));
    }
    let vitals = {
        let (cluster, heartbeats, metrics) = (Arc::clone(&cluster), heartbeats.clone(), state.metrics.clone());
        move || vitals::run(Arc::clone(&cluster), heartbeats.clone(), metrics.clone())
    };
    tokio::spawn(supervised("vitals", state.metrics.loop_panics.clone(), vitals));
    let lead = lead(
        args,
        reconcilers,
        election,
        cluster,
        derived,
        debug,
        controller_metrics,
        Arc::clone(&state),
        stopped.clone(),
    );
    let lead = tokio::spawn(lead);
    let mut end = stopped.clone();
    let mut lead = lead;
    let mut led = Ok(());
    server
        .run_until(async {
            tokio::select! {
                result = &mut lead => {
                    led = result.context("the reconcilers failed").and_then(|result| result);
                    if led.is_ok() { Shutdown::Stop } else { Shutdown::Restart }
                }
                _ = end.wait_for(|stop| *stop) => Shutdown::Stop,
            }
        })
        .await?;
    if !lead.is_finished() {
        // The lease is released during shutdown.
        if let Ok(result) = tokio::time::timeout(Duration::from_secs(5), lead).await {
            led = result.context("the reconcilers failed").and_then(|result| result);
        }
    }
    led
}

fn write_addresses(file: &std::path::Path, server: &Server) -> anyhow::Result<()> {
    let addrs = server.addrs();
    let text = serde_json::json!({
        "https": addrs.https.to_string(),
        "metrics": addrs.metrics.map(|addr| addr.to_string()),
        "health": addrs.health.map(|addr| addr.to_string()),
    });
    let temporary = file.with_extension("tmp");
    std::fs::write(&temporary, text.to_string())
        .and_then(|()| std::fs::rename(&temporary, file))
        .with_context(|| format!("writing --address-file {}", file.display()))
}

/// Waits for a stop signal. Returns its name.
async fn stop_signal() -> &'static str {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}
