//! Arguments of `stowage controller`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{ArgAction, Args, ValueEnum};
use stowage_cloud::simulated::BootDelay;
use stowage_runtime::telemetry::metric::MetricNames;

use crate::cli::args::{LeaseArgs, parse_bool, parse_duration};
use crate::cli::aws::AwsArgs;
use crate::cli::planning::PlanArgs;
use crate::decisions::placement::mode::PlacementMode;
use crate::webhook::rule_list::parse_id;

/// `--cloud`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CloudKind {
    /// In-process EC2 simulation with real instance types and prices; needs no account
    Simulated,
    /// Amazon EC2
    Ec2,
}

/// `--log-output-paths`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogOutput {
    Stdout,
    Stderr,
}

/// `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line
    Json,
    /// Plain text
    Text,
}

/// `--log-level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Details for troubleshooting
    Debug,
    /// Every action on nodes
    Info,
    /// What an operator should know: refused or repeated calls, degraded functions
    Warn,
    /// Defects, and failures that stop a function
    Error,
}

/// Arguments of `stowage controller`.
#[derive(Args, Debug)]
pub struct ControllerArgs {
    /// Cloud that nodes are launched in.
    #[arg(long, env = "STOWAGE_CLOUD", value_enum, default_value = "simulated")]
    pub cloud: CloudKind,
    /// How the plan is enforced on kube-scheduler.
    #[arg(long, env = "STOWAGE_PLACEMENT", value_enum, default_value = "nominate")]
    pub placement: PlacementMode,
    /// Name of the cluster.
    #[arg(long, env = "CLUSTER_NAME", default_value = "")]
    pub cluster_name: String,

    /// Address that all listeners bind to.
    #[arg(long, env = "STOWAGE_BIND_ADDRESS", default_value = "0.0.0.0")]
    pub bind_address: IpAddr,
    /// Port of the webhook and the extender (HTTPS); 0 selects a free port.
    #[arg(long, env = "STOWAGE_HTTPS_PORT", default_value_t = 9443)]
    pub https_port: u16,
    /// Directory with tls.crt, tls.key and ca.crt; reloaded when they change.
    #[arg(long, env = "STOWAGE_CERT_DIR", default_value = "/etc/stowage/tls")]
    pub cert_dir: PathBuf,
    /// CA bundle for the scheduler's client certificate [default: ca.crt in --cert-dir].
    #[arg(long, env = "STOWAGE_CLIENT_CA")]
    pub client_ca: Option<PathBuf>,
    /// Names of the scheduler: common names, DNS names or URIs of the client certificates that the extender accepts.
    #[arg(long, env = "STOWAGE_EXTENDER_CLIENT_NAMES", value_delimiter = ',', default_value = "stowage-scheduler", value_parser = NonEmptyStringValueParser::new())]
    pub extender_client_names: Vec<String>,
    /// CA bundle for the API server's client certificate; without one, anyone may call the webhook.
    #[arg(long, env = "STOWAGE_WEBHOOK_CLIENT_CA")]
    pub webhook_client_ca: Option<PathBuf>,
    /// Names of the API server: common names, DNS names or URIs of the client certificates that the webhook accepts.
    #[arg(long, env = "STOWAGE_WEBHOOK_CLIENT_NAMES", value_delimiter = ',', default_value = "kube-apiserver", value_parser = NonEmptyStringValueParser::new())]
    pub webhook_client_names: Vec<String>,
    /// Names of operators: common names, DNS names or URIs of the client certificates, signed by the CA of --client-ca, that may read /debug/state; empty for none.
    #[arg(long, env = "STOWAGE_DEBUG_CLIENT_NAMES", value_delimiter = ',', default_value = "stowage-debug")]
    pub debug_client_names: Vec<String>,
    /// Ids of admission rules that the webhook does not apply, such as n1,n13 [default: none].
    #[arg(long, env = "STOWAGE_DISABLED_ADMISSION_RULES", value_parser = parse_rules, default_value = "", hide_default_value = true)]
    pub disabled_admission_rules: DisabledRules,
    /// Port of /metrics; 0 selects a free port.
    #[arg(long, env = "METRICS_PORT", default_value_t = 8080)]
    pub metrics_port: u16,
    /// Port of /livez, /healthz and /readyz; 0 selects a free port.
    #[arg(long, env = "HEALTH_PROBE_PORT", default_value_t = 8081)]
    pub health_probe_port: u16,
    /// File to write the bound addresses to, as JSON.
    #[arg(long, env = "STOWAGE_ADDRESS_FILE")]
    pub address_file: Option<PathBuf>,

    /// Idle time after the last new pod before a batch is planned, while the scheduler is busy [default: 1s].
    #[arg(long, env = "BATCH_IDLE_DURATION", value_parser = parse_duration)]
    pub batch_idle_duration: Option<Duration>,
    /// Maximum time that a batch stays open [default: 1s, or 10s if --batch-idle-duration is set].
    #[arg(long, env = "BATCH_MAX_DURATION", value_parser = parse_duration)]
    pub batch_max_duration: Option<Duration>,
    /// Plan pods that kube-scheduler has not attempted, if no node has room for one of them even if it were alone. Otherwise they wait for its rejection.
    #[arg(long, env = "STOWAGE_PLAN_UNATTEMPTED", default_value_t = true, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub plan_unattempted: bool,
    /// Maximum number of NodeClaims created in any minute, against runaway purchases.
    #[arg(long, env = "STOWAGE_MAX_PURCHASES_PER_MINUTE", default_value_t = 1_000)]
    pub max_purchases_per_minute: usize,
    /// Maximum number of nodes disrupted voluntarily, or collected as garbage, in any minute.
    #[arg(long, env = "STOWAGE_MAX_DISRUPTIONS_PER_MINUTE", default_value_t = 200)]
    pub max_disruptions_per_minute: usize,
    /// Maximum number of pods evicted in any second, at least 1. Nodes with a deadline, such as interrupted ones, are not limited.
    #[arg(long, env = "STOWAGE_MAX_EVICTIONS_PER_SECOND", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..))]
    pub max_evictions_per_second: u16,
    /// Planner settings.
    #[command(flatten)]
    pub plan: PlanArgs,
    /// EC2 settings.
    #[command(flatten)]
    pub aws: AwsArgs,

    /// Run the reconcilers without a Lease of their own; only safe with a single replica.
    #[arg(long, env = "DISABLE_LEADER_ELECTION", default_value_t = false, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub disable_leader_election: bool,
    /// The Lease.
    #[command(flatten)]
    pub lease: LeaseArgs,

    /// EC2: publish the series of each instance type and offering, tens of thousands in large regions.
    #[arg(long, env = "STOWAGE_OFFERING_METRICS", default_value_t = true, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub offering_metrics: bool,
    /// No metrics of single nodes, pods and conditions: `karpenter_nodes_allocatable` and others with the label `node_name`, `karpenter_pods_state` and others with the name of a pod, `operator_*`.
    #[arg(long, env = "DISABLE_CLUSTER_STATE_OBSERVABILITY", default_value_t = false, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub disable_cluster_state_observability: bool,
    /// Names of metrics that Karpenter has, too.
    #[arg(long, env = "STOWAGE_METRIC_NAMES", value_enum, default_value = "both")]
    pub metric_names: MetricNames,
    /// Component that reports the events, such as `karpenter` for what selects the events of Karpenter.
    #[arg(long, env = "STOWAGE_REPORTING_COMPONENT", default_value = "stowage", value_parser = parse_component)]
    pub reporting_component: String,
    /// Lowest severity that is logged.
    #[arg(long, env = "LOG_LEVEL", value_enum, default_value = "info")]
    pub log_level: LogLevel,
    /// Where the log is written, separated by commas; not to files.
    #[arg(long, env = "LOG_OUTPUT_PATHS", value_enum, value_delimiter = ',', default_value = "stderr")]
    pub log_output_paths: Vec<LogOutput>,
    /// Log format.
    #[arg(long, env = "STOWAGE_LOG_FORMAT", value_enum, default_value = "json")]
    pub log_format: LogFormat,

    /// Simulated EC2: file that keeps instances across restarts.
    #[arg(long, env = "STOWAGE_SIMULATED_STATE")]
    pub simulated_state: Option<PathBuf>,
    /// Simulated EC2: time from launch to a running kubelet, such as 30s or 20s-40s.
    #[arg(long, env = "STOWAGE_SIMULATED_BOOT_DELAY", default_value = "20s-40s", value_parser = parse_boot_delay)]
    pub simulated_boot_delay: BootDelay,
    /// Simulated EC2: time from a spot interruption notice to termination.
    #[arg(long, env = "STOWAGE_SIMULATED_INTERRUPTION_NOTICE", default_value = "2m", value_parser = parse_duration)]
    pub simulated_interruption_notice: Duration,
    /// Simulated EC2: seed of all random draws.
    #[arg(long, env = "STOWAGE_SIMULATED_SEED", default_value_t = 1)]
    pub simulated_seed: u64,
}

/// `--disabled-admission-rules`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DisabledRules(pub Vec<&'static str>);

/// The name of a component, as the API server accepts it in an event: a qualified name without a prefix.
fn parse_component(text: &str) -> Result<String, String> {
    let is_end = |byte: u8| byte.is_ascii_alphanumeric();
    let bytes = text.as_bytes();
    let inner = bytes.iter().all(|byte| is_end(*byte) || b"-_.".contains(byte));
    let ends = [bytes.first(), bytes.last()].into_iter().flatten().all(|byte| is_end(*byte));
    if inner && ends && (1..=63).contains(&text.len()) {
        return Ok(text.to_owned());
    }
    Err("expected up to 63 letters, digits, '-', '_' and '.', such as stowage".to_owned())
}

fn parse_rules(text: &str) -> Result<DisabledRules, String> {
    let ids = text.split(',').filter(|id| !id.trim().is_empty());
    ids.map(|id| parse_id(id).map_err(|error| format!("{id}: {error}"))).collect::<Result<_, _>>().map(DisabledRules)
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
    fn an_invalid_setting_is_an_error_with_its_name_and_the_expected_syntax() {
        for (args, wanted) in [
            (["--batch-idle-duration", "soon"], ["--batch-idle-duration", "soon", "10s"]),
            (["--placement", "magic"], ["--placement", "magic", "extender, nominate, off"]),
            (["--metrics-port", "80800"], ["--metrics-port", "80800", "65535"]),
            (["--preference-policy", "respect"], ["--preference-policy", "respect", "Respect, Ignore"]),
            (
                ["--extender-client-names", "a,,b"],
                ["--extender-client-names", "a value is required", "none was supplied"],
            ),
            (["--disabled-admission-rules", "n1,n99"], ["--disabled-admission-rules", "n99", "n1, n9, n22, n13, n11"]),
            (["--disable-leader-election", "yes"], ["--disable-leader-election", "yes", "true, false"]),
            (["--simulated-boot-delay", "9s-3s"], ["--simulated-boot-delay", "9s-3s", "must not be longer"]),
            (["--reporting-component", "a b"], ["--reporting-component", "a b", "letters, digits"]),
            (["--reporting-component", "a-"], ["--reporting-component", "a-", "letters, digits"]),
        ] {
            let error = parse(&args).unwrap_err();
            for part in wanted {
                assert!(error.contains(part), "{part} is not in: {error}");
            }
        }
    }

    #[test]
    fn no_admission_rule_is_disabled_by_default_and_any_of_them_by_its_id() {
        let disabled = |args: &[&str]| parse(args).unwrap().disabled_admission_rules.0;
        assert!(disabled(&[]).is_empty() && disabled(&["--disabled-admission-rules="]).is_empty());
        assert_eq!(disabled(&["--disabled-admission-rules", "n13, n9"]), ["n13", "n9"]);
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
        assert_eq!(args.batch_idle_duration, Some(Duration::from_millis(250)));
        assert_eq!(args.batch_max_duration, Some(Duration::from_secs(90)));
        assert_eq!(args.simulated_boot_delay, BootDelay::Between(Duration::from_secs(2), Duration::from_secs(3)));
    }
}
