//! `stowage controller`: the service. Settings that mean what one of Karpenter's means keep its flag and variable.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{ArgAction, Args, ValueEnum};
use tracing_subscriber::EnvFilter;

use crate::api::duration;
use crate::cli::aws::AwsArgs;
use crate::cli::planning::{MinValues, PlanArgs};
use crate::cloud::Cloud;
use crate::cloud::catalog::SpotPricing;
use crate::cloud::ec2;
use crate::cloud::ec2::Ec2Provider;
use crate::cloud::simulated::{BootDelay, Script, SimulatedConfig, SimulatedEc2};
use crate::controllers::context::{PlacementMode, Settings};
use crate::controllers::disruption::run;
use crate::controllers::enforcement::{extender_view, nominations};
use crate::controllers::interruption::{queue, status_checks};
use crate::controllers::leader::Candidate;
use crate::controllers::node_claim::{
    capacity_reservations, drift, expiration, garbage_collection, lifecycle, tagging,
};
use crate::controllers::node_class::{degraded_apis, reconcile};
use crate::controllers::node_pool::{status, zonal_shift};
use crate::controllers::provisioning::provisioner;
use crate::controllers::{Context, cloud_sync};
use crate::server::{AppState, Server, ServerConfig, system_now_ms};
use crate::state::{Cluster, ClusterState, watch};
use crate::telemetry::Metrics;
use crate::telemetry::controllers::ControllerMetrics;
use crate::webhook::AdmissionConfig;

/// Which cloud.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CloudKind {
    /// EC2 inside the process, with real instance types and prices: no account needed.
    Simulated,
    /// Amazon EC2.
    Ec2,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

/// Least severe level that is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Everything worth knowing when something is wrong.
    Debug,
    /// What happens.
    Info,
    /// What somebody should look at and what failed.
    Error,
}

/// Settings of the service.
#[derive(Args, Debug)]
pub struct ControllerArgs {
    /// Where nodes come from.
    #[arg(long, env = "STOWAGE_CLOUD", value_enum, default_value = "simulated")]
    pub cloud: CloudKind,
    /// How kube-scheduler is made to follow the plan.
    #[arg(long, env = "STOWAGE_PLACEMENT", value_enum, default_value = "nominate")]
    pub placement: PlacementMode,
    /// Name of the cluster.
    #[arg(long, env = "CLUSTER_NAME", default_value = "")]
    pub cluster_name: String,

    /// Address that every port listens on.
    #[arg(long, env = "STOWAGE_BIND_ADDRESS", default_value = "0.0.0.0")]
    pub bind_address: IpAddr,
    /// Port of the webhook and the extender (HTTPS); 0 takes any free one.
    #[arg(long, env = "STOWAGE_HTTPS_PORT", default_value_t = 9443)]
    pub https_port: u16,
    /// Folder with tls.crt, tls.key and ca.crt; read again when they change.
    #[arg(long, env = "STOWAGE_CERT_DIR", default_value = "/etc/stowage/tls")]
    pub cert_dir: PathBuf,
    /// CA that signs the scheduler's client certificate; ca.crt of the folder when absent.
    #[arg(long, env = "STOWAGE_CLIENT_CA")]
    pub client_ca: Option<PathBuf>,
    /// Port of /metrics; 0 takes any free one.
    #[arg(long, env = "METRICS_PORT", default_value_t = 8080)]
    pub metrics_port: u16,
    /// Port of /livez, /healthz and /readyz; 0 takes any free one.
    #[arg(long, env = "HEALTH_PROBE_PORT", default_value_t = 8081)]
    pub health_probe_port: u16,
    /// Write the addresses that are really listened on into this file, as JSON.
    #[arg(long, env = "STOWAGE_ADDRESS_FILE")]
    pub address_file: Option<PathBuf>,

    /// A burst of pods is over when none came for so long.
    #[arg(long, env = "BATCH_IDLE_DURATION", default_value = "1s", value_parser = parse_duration)]
    pub batch_idle_duration: Duration,
    /// A burst is never waited out longer than this.
    #[arg(long, env = "BATCH_MAX_DURATION", default_value = "10s", value_parser = parse_duration)]
    pub batch_max_duration: Duration,
    /// How plans are made.
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Amazon EC2.
    #[command(flatten)]
    pub aws: AwsArgs,

    /// Lead without a Lease: only where there is one replica.
    #[arg(long, env = "DISABLE_LEADER_ELECTION", default_value_t = false, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub disable_leader_election: bool,
    /// Name of the Lease. Karpenter's own, so that the two never provision at the same time.
    #[arg(long, env = "LEADER_ELECTION_NAME", default_value = "karpenter-leader-election")]
    pub leader_election_name: String,
    /// Namespace of the Lease; the pod's own when empty.
    #[arg(long, env = "LEADER_ELECTION_NAMESPACE", default_value = "")]
    pub leader_election_namespace: String,

    /// Least severe level that is logged.
    #[arg(long, env = "LOG_LEVEL", value_enum, default_value = "info")]
    pub log_level: LogLevel,
    /// How log lines look.
    #[arg(long, env = "STOWAGE_LOG_FORMAT", value_enum, default_value = "json")]
    pub log_format: LogFormat,

    /// Simulated EC2: file that instances are remembered in across restarts.
    #[arg(long, env = "STOWAGE_SIMULATED_STATE")]
    pub simulated_state: Option<PathBuf>,
    /// Simulated EC2: what goes wrong and when (YAML).
    #[arg(long, env = "STOWAGE_SIMULATED_SCRIPT")]
    pub simulated_script: Option<PathBuf>,
    /// Simulated EC2: from launch to a running kubelet, as 30s or 20s-40s.
    #[arg(long, env = "STOWAGE_SIMULATED_BOOT_DELAY", default_value = "20s-40s", value_parser = parse_boot_delay)]
    pub simulated_boot_delay: BootDelay,
    /// Simulated EC2: from the notice of a spot interruption to the end of the instance.
    #[arg(long, env = "STOWAGE_SIMULATED_INTERRUPTION_NOTICE", default_value = "2m", value_parser = parse_duration)]
    pub simulated_interruption_notice: Duration,
    /// Simulated EC2: seed of everything that is drawn.
    #[arg(long, env = "STOWAGE_SIMULATED_SEED", default_value_t = 1)]
    pub simulated_seed: u64,
}

/// A truth value as Go's `strconv.ParseBool` reads it, since Karpenter does.
pub(crate) fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("one of true, false, 1, 0, t or f is wanted".into()),
    }
}

/// A duration such as 500ms, 10s or 1m30s.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let wanted = "a duration such as 500ms, 10s or 1m30s is wanted";
    let milliseconds = match text.strip_suffix("ms").map(str::parse::<i64>) {
        Some(parsed) => parsed.map_err(|_| wanted.to_owned())?,
        None => duration::parse(text).map_err(|error| format!("{error}; {wanted}"))?,
    };
    u64::try_from(milliseconds).map(Duration::from_millis).map_err(|_| wanted.to_owned())
}

fn parse_boot_delay(text: &str) -> Result<BootDelay, String> {
    match text.split_once('-') {
        None => parse_duration(text).map(BootDelay::Fixed),
        Some((least, most)) => {
            let (least, most) = (parse_duration(least)?, parse_duration(most)?);
            if least > most {
                return Err(format!("the first of {text} must not be longer than the second"));
            }
            Ok(BootDelay::Between(least, most))
        }
    }
}

/// Runs the service until it is told to stop or loses its lease.
///
/// # Errors
/// A setting, file or address that can't be used; a lost lease.
pub fn run(args: &ControllerArgs) -> anyhow::Result<()> {
    let filter = match args.log_level {
        LogLevel::Debug => "stowage=debug,info",
        LogLevel::Info => "stowage=info,warn",
        LogLevel::Error => "error",
    };
    let logs = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(filter)).with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Json => logs.json().flatten_event(true).init(),
        LogFormat::Text => logs.with_ansi(false).init(),
    }
    // Whoever installed a provider before us chose it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting the runtime")?;
    let result = runtime.block_on(serve(args));
    // Watches and reconcilers have no state worth waiting for: all of it is in the API server and the cloud.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn serve(args: &ControllerArgs) -> anyhow::Result<()> {
    let config = kube::Config::infer()
        .await
        .context("no access to a cluster: set KUBECONFIG, or run in a pod with a service account")?;
    let namespace = match args.leader_election_namespace.as_str() {
        "" => config.default_namespace.clone(),
        namespace => namespace.to_owned(),
    };
    let client = kube::Client::try_from(config.clone()).context("making a client of the API server")?;
    // On a connection of its own: the lease must not wait behind hundreds of claims that are written at once. Nor behind the
    // client's own retries, which take longer than it lasts.
    let mut once = config;
    once.default_retry = false;
    let own = kube::Client::try_from(once.clone()).context("making a client of the API server for the lease")?;
    let evictions = kube::Client::try_from(once).context("making a client of the API server for evictions")?;
    let election = (!args.disable_leader_election).then(|| {
        let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "stowage".into());
        let identity = format!("{host}_{}_{}", std::process::id(), system_now_ms());
        Candidate::new(own, &namespace, &args.leader_election_name, identity)
    });
    let cluster = Arc::new(Cluster::new(ClusterState::with_default_spread(args.plan.scheduler_config.clone())));

    let metrics = Metrics::new();
    let controller_metrics = ControllerMetrics::new(metrics.registry()).context("registering metrics")?;
    let state = Arc::new(AppState::new(AdmissionConfig::default(), metrics, system_now_ms));
    let mut server_config = ServerConfig::new(&args.cert_dir);
    let at = |port| SocketAddr::new(args.bind_address, port);
    server_config.https_addr = at(args.https_port);
    server_config.client_ca.clone_from(&args.client_ca);
    server_config.metrics_addr = Some(at(args.metrics_port));
    server_config.health_addr = Some(at(args.health_probe_port));
    let server = Server::start(server_config, Arc::clone(&state)).await?;
    if let Some(file) = &args.address_file {
        write_addresses(file, &server)?;
    }

    let (stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(async move {
        told_to_stop().await;
        let _ = stop.send(true);
    });
    watch::start(&client, &cluster, !args.plan.scheduler_config.is_empty());
    if args.placement != PlacementMode::Off {
        tokio::spawn(extender_view::show(Arc::clone(&cluster), Arc::clone(&state.view)));
    }
    let lead =
        lead(args, client, evictions, election, cluster, controller_metrics, Arc::clone(&state), stopped.clone());
    let lead = tokio::spawn(lead);
    let mut end = stopped.clone();
    let mut lead = lead;
    let mut led = Ok(());
    server
        .run_until(async {
            tokio::select! {
                result = &mut lead => led = result.context("the reconcilers failed").and_then(|result| result),
                _ = end.wait_for(|stop| *stop) => {}
            }
        })
        .await?;
    if !lead.is_finished() {
        // The lease is given back on the way out.
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

async fn told_to_stop() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// A cloud of which the settings are known.
enum Prepared {
    Simulated(Arc<SimulatedEc2>),
    Ec2(Box<ec2::Options>),
}

/// A cloud that answers, and is started when this process leads.
enum Connected {
    Simulated(Arc<SimulatedEc2>),
    Ec2(Box<(ec2::Clients, ec2::Options)>),
}

impl Prepared {
    async fn connect(self) -> anyhow::Result<Connected> {
        Ok(match self {
            Self::Simulated(simulated) => Connected::Simulated(simulated),
            Self::Ec2(options) => Connected::Ec2(Box::new((Ec2Provider::connect().await?, *options))),
        })
    }
}

fn cloud(args: &ControllerArgs) -> anyhow::Result<Prepared> {
    match args.cloud {
        CloudKind::Ec2 => {
            let strict_min_values = args.plan.min_values_policy == MinValues::Strict;
            let options = ec2::Options { strict_min_values, ..args.aws.options(&args.cluster_name)? };
            Ok(Prepared::Ec2(Box::new(options)))
        }
        CloudKind::Simulated => Ok(Prepared::Simulated(simulated(args)?)),
    }
}

fn simulated(args: &ControllerArgs) -> anyhow::Result<Arc<SimulatedEc2>> {
    let script = match &args.simulated_script {
        None => Script::default(),
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("reading --simulated-script {}", file.display()))?;
            Script::parse(&text).with_context(|| format!("--simulated-script {}", file.display()))?
        }
    };
    let config = SimulatedConfig {
        seed: args.simulated_seed,
        spot: SpotPricing::Synthetic { seed: args.simulated_seed },
        boot_delay: args.simulated_boot_delay,
        interruption_notice: args.simulated_interruption_notice,
        state_file: args.simulated_state.clone(),
        script,
        node_class_cel: args.aws.node_class_cel(),
        ..SimulatedConfig::default()
    };
    Ok(Arc::new(SimulatedEc2::open(config).context("--simulated-state")?))
}

#[allow(clippy::too_many_arguments)]
fn lead(
    args: &ControllerArgs,
    client: kube::Client,
    evictions: kube::Client,
    mut election: Option<Candidate>,
    cluster: Arc<Cluster>,
    metrics: ControllerMetrics,
    state: Arc<AppState>,
    mut stopped: tokio::sync::watch::Receiver<bool>,
) -> impl Future<Output = anyhow::Result<()>> + Send + 'static {
    let made = cloud(args);
    let services = !args.plan.scheduler_config.is_empty();
    let settings = Settings {
        placement: args.placement,
        batch_idle_ms: i64::try_from(args.batch_idle_duration.as_millis()).unwrap_or(i64::MAX),
        batch_max_ms: i64::try_from(args.batch_max_duration.as_millis()).unwrap_or(i64::MAX),
        plan: args.plan.settings(),
    };
    async move {
        // A replica that can't reach its cloud says so now, not when it leads.
        let connected = made?.connect().await?;
        watch::synced(&cluster, services).await;
        state.readiness.set_caches_synced(true);
        tracing::info!("caches synced");
        if let Some(candidate) = &mut election {
            tokio::select! {
                () = candidate.acquire() => tracing::info!("leading"),
                _ = stopped.wait_for(|stop| *stop) => return Ok(()),
            }
        }
        let mut loops = tokio::task::JoinSet::new();
        let cloud: Arc<dyn Cloud> = match connected {
            Connected::Ec2(made) => {
                let (clients, options) = *made;
                // The region's catalog takes its time, and the lease must not run out meanwhile.
                let started = tokio::select! {
                    started = Ec2Provider::start(&client, clients, options) => Some(started?),
                    lost = lost(&mut election) => return Err(lost),
                    _ = stopped.wait_for(|stop| *stop) => None,
                };
                let Some(started) = started else {
                    release(&mut election).await;
                    return Ok(());
                };
                let ec2 = Arc::new(started);
                loops.spawn(Arc::clone(&ec2).run(client.clone()));
                ec2::publish(&ec2, state.metrics.registry()).context("registering metrics of EC2")?;
                ec2
            }
            Connected::Simulated(simulated) => {
                let mut stopped = stopped.clone();
                let shutdown = async move {
                    let _ = stopped.wait_for(|stop| *stop).await;
                };
                tokio::spawn(Arc::clone(&simulated).run(client.clone(), shutdown));
                simulated
            }
        };
        let ctx = Arc::new(Context::new(client, evictions, cluster, cloud, settings, metrics));
        // Each of these does nothing when the cloud lacks the capability it needs.
        loops.spawn(tagging::run(Arc::clone(&ctx)));
        loops.spawn(cloud_sync::run(Arc::clone(&ctx)));
        loops.spawn(garbage_collection::profiles(Arc::clone(&ctx)));
        loops.spawn(capacity_reservations::run(Arc::clone(&ctx)));
        loops.spawn(zonal_shift::run(Arc::clone(&ctx)));
        loops.spawn(degraded_apis::run(Arc::clone(&ctx)));
        loops.spawn(reconcile::run(Arc::clone(&ctx)));
        loops.spawn(status::run(Arc::clone(&ctx)));
        loops.spawn(provisioner::run(Arc::clone(&ctx)));
        loops.spawn(provisioner::tell_unreadable(Arc::clone(&ctx)));
        loops.spawn(lifecycle::run(Arc::clone(&ctx)));
        loops.spawn(nominations::keep(Arc::clone(&ctx)));
        loops.spawn(queue::listen(Arc::clone(&ctx)));
        loops.spawn(queue::depart(Arc::clone(&ctx)));
        loops.spawn(status_checks::run(Arc::clone(&ctx)));
        loops.spawn(drift::run(Arc::clone(&ctx)));
        loops.spawn(expiration::run(Arc::clone(&ctx)));
        loops.spawn(run::run(Arc::clone(&ctx)));
        loops.spawn(garbage_collection::run(Arc::clone(&ctx)));
        let result = tokio::select! {
            lost = lost(&mut election) => Err(lost),
            ended = loops.join_next() => Err(anyhow::anyhow!("a reconciler ended: {:?}", ended.and_then(Result::err))),
            _ = stopped.wait_for(|stop| *stop) => Ok(()),
        };
        // Nothing may be written any more once another replica can lead.
        loops.shutdown().await;
        if result.is_ok() {
            release(&mut election).await;
        }
        result
    }
}

/// Keeps the lease; returns why it is lost.
async fn lost(election: &mut Option<Candidate>) -> anyhow::Error {
    match election {
        Some(candidate) => {
            let why = candidate.keep().await;
            anyhow::anyhow!("the leader lease was lost: {why}; this replica starts over")
        }
        None => std::future::pending().await,
    }
}

async fn release(election: &mut Option<Candidate>) {
    if let Some(candidate) = election {
        candidate.release().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    fn parse(args: &[&str]) -> Result<ControllerArgs, String> {
        let all = ["stowage", "controller"].iter().chain(args);
        match Cli::try_parse_from(all).map_err(|error| error.to_string())?.command {
            crate::cli::Command::Controller(args) => Ok(*args),
            crate::cli::Command::Simulate(_) | crate::cli::Command::Preflight(_) => Err("another subcommand".into()),
        }
    }

    #[test]
    fn a_setting_that_does_not_parse_names_itself_its_value_and_what_would_be_right() {
        for (args, wanted) in [
            (["--batch-idle-duration", "soon"], ["--batch-idle-duration", "soon", "10s"]),
            (["--placement", "magic"], ["--placement", "magic", "extender, nominate, off"]),
            (["--metrics-port", "80800"], ["--metrics-port", "80800", "65535"]),
            (["--preference-policy", "respect"], ["--preference-policy", "respect", "Respect, Ignore"]),
            (["--disable-leader-election", "yes"], ["--disable-leader-election", "yes", "true, false"]),
            (["--simulated-boot-delay", "9s-3s"], ["--simulated-boot-delay", "9s-3s", "must not be longer"]),
        ] {
            let error = parse(&args).unwrap_err();
            for part in wanted {
                assert!(error.contains(part), "{part} is not in: {error}");
            }
        }
    }

    #[test]
    fn durations_and_boot_delays_are_read() {
        let args = parse(&[
            "--batch-idle-duration",
            "250ms",
            "--batch-max-duration",
            "1m30s",
            "--simulated-boot-delay",
            "2s-3s",
        ])
        .unwrap();
        assert_eq!(args.batch_idle_duration, Duration::from_millis(250));
        assert_eq!(args.batch_max_duration, Duration::from_secs(90));
        assert_eq!(args.simulated_boot_delay, BootDelay::Between(Duration::from_secs(2), Duration::from_secs(3)));
    }
}
