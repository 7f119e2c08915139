//! `stowage preflight`: checks AWS permissions, quotas and node classes, and prints a remediation per finding.

pub mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use kube::{Api, ResourceExt};
use stowage_api::{Ec2NodeClass, NodePool};
use stowage_cloud::ec2::AwsClients;
use stowage_cloud::ec2::ClientOverrides;
use stowage_cloud::ec2::preflight;
use stowage_cloud::ec2::preflight::{CheckResult, ClassSource, leases};
use stowage_planner::DefaultSpread;
use stowage_runtime::clock;

use crate::cli::args::LeaseArgs;
use crate::cli::aws::AwsArgs;
use crate::cli::cluster_access;
use crate::cli::manifests::Input;
use crate::controllers::leader::other_leaders::KARPENTER_LEASE;

/// No check failed.
const FIT: u8 = 0;
/// A check failed.
const UNFIT: u8 = 1;
/// Attempts per call; few, because the command is interactive.
const ATTEMPTS: u32 = 3;

/// Arguments of `stowage preflight`.
#[derive(Args, Debug)]
pub struct PreflightArgs {
    /// Name of the cluster.
    #[arg(long, env = "CLUSTER_NAME", default_value = "", hide_default_value = true)]
    pub cluster_name: String,
    /// Region [default: from the AWS SDK's environment].
    #[arg(long, value_name = "REGION")]
    pub region: Option<String>,
    /// ARN of a role to assume first, such as the controller's [default: the credentials of the AWS SDK's environment].
    #[arg(long, value_name = "ARN")]
    pub role: Option<String>,
    /// Manifest or directory with EC2NodeClasses to check [default: the EC2NodeClasses of the cluster]. May be repeated.
    #[arg(short = 'f', long = "file", value_name = "FILE_OR_DIR")]
    pub files: Vec<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    /// The controller's Lease.
    #[command(flatten)]
    pub lease: LeaseArgs,
    /// EC2 settings, the same as for the controller.
    #[command(flatten)]
    pub aws: AwsArgs,
}

/// `--output`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Table
    Table,
    /// JSON
    Json,
}

/// Runs the command: prints the findings on `out` and returns the exit code: 0 when no check failed, 1 otherwise.
///
/// # Errors
/// Settings, manifests or a kubeconfig are unusable; `out` cannot be written to.
pub fn run(args: &PreflightArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    // An already installed provider stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    runtime.block_on(check(args, out))
}

async fn check(args: &PreflightArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    let options = args.aws.options(&args.cluster_name)?;
    let (classes, pools) = manifests(&args.files)?;
    let mut own_lease = None;
    let (kube, classes, pools, origin) = if args.files.is_empty() {
        let config = cluster_access::config()
            .await
            .context("no manifests and no access to a cluster: select manifests with --file, or set KUBECONFIG")?;
        own_lease =
            Some(format!("{}/{}", args.lease.namespace(&config.default_namespace), args.lease.leader_election_name));
        let client = kube::Client::try_from(config).context("creating a Kubernetes client")?;
        let api: Api<Ec2NodeClass> = Api::all(client.clone());
        let listed = api.list(&kube::api::ListParams::default()).await;
        let listed =
            listed.context("the EC2NodeClasses of the cluster could not be listed: select manifests with --file")?;
        // Without NodePools only the quotas of standard instances are checked.
        let pools = Api::<NodePool>::all(client.clone()).list(&kube::api::ListParams::default()).await;
        (Some(client), listed.items, pools.map(|pools| pools.items).unwrap_or_default(), ClassSource::Cluster)
    } else {
        // Used only for facts that neither the settings nor EKS provide.
        let config = cluster_access::config().await.ok();
        (config.and_then(|config| kube::Client::try_from(config).ok()), classes, pools, ClassSource::Files)
    };
    let overrides = ClientOverrides { region: args.region.clone(), role: args.role.clone(), attempts: Some(ATTEMPTS) };
    let clients = AwsClients::connect(overrides).await?;
    let mut findings = Box::pin(preflight::check(&clients, &options, kube.as_ref(), origin, &classes, &pools)).await;
    if let (Some(own), Some(kube)) = (own_lease, &kube) {
        let names = BTreeSet::from([args.lease.leader_election_name.clone(), KARPENTER_LEASE.to_owned()]);
        findings.push(leases::finding(&own, &leases::fetch(kube, &names).await, clock::timestamp()));
    }
    match args.output {
        Output::Table => report::table(&findings, out),
        Output::Json => report::json(&findings, &clients.region, &args.cluster_name, out),
    }
    .context("writing the findings")?;
    Ok(if findings.iter().any(|finding| finding.result == CheckResult::Failed) { UNFIT } else { FIT })
}

/// The EC2NodeClasses of manifests, by name, and the NodePools.
fn manifests(files: &[PathBuf]) -> anyhow::Result<(Vec<Ec2NodeClass>, Vec<NodePool>)> {
    let mut input = Input::with_default_spread(DefaultSpread::default());
    for file in files {
        input.read_manifests(file)?;
    }
    let classes: BTreeMap<String, Ec2NodeClass> = input.node_classes;
    if !files.is_empty() && classes.is_empty() {
        bail!("there is no EC2NodeClass in the manifests: select other manifests with --file");
    }
    if classes.values().any(|class| class.name_any().is_empty()) {
        bail!("an EC2NodeClass in the manifests has no name: set metadata.name");
    }
    Ok((classes.into_values().collect(), input.pools.into_iter().map(|(_, pool)| pool).collect()))
}
