//! `stowage preflight`: whether an account, a region and a cluster are fit for the controller, and what to do where not.

pub mod report;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use kube::{Api, ResourceExt};

use crate::api::{Ec2NodeClass, NodePool};
use crate::cli::aws::AwsArgs;
use crate::cli::manifests::Input;
use crate::cloud::ec2::Clients;
use crate::cloud::ec2::aws::client::Instead;
use crate::cloud::ec2::preflight;
use crate::cloud::ec2::preflight::{Grade, Origin};
use crate::planner::input::default_spread::DefaultSpread;

/// Nothing failed.
const FIT: u8 = 0;
/// Something failed.
const UNFIT: u8 = 1;
/// Attempts of each call: somebody waits.
const ATTEMPTS: u32 = 3;

/// Checks what the controller needs in AWS. Changes nothing there.
#[derive(Args, Debug)]
pub struct PreflightArgs {
    /// Name of the cluster.
    #[arg(long, env = "CLUSTER_NAME", default_value = "", hide_default_value = true)]
    pub cluster_name: String,
    /// Region; what the SDK's environment says without it.
    #[arg(long, value_name = "REGION")]
    pub region: Option<String>,
    /// ARN of a role to assume first, as the controller's; the credentials of the SDK's environment without it.
    #[arg(long, value_name = "ARN")]
    pub role: Option<String>,
    /// EC2NodeClasses to check, from a manifest or a folder of them; those of the cluster without it. May be repeated.
    #[arg(short = 'f', long = "file", value_name = "FILE_OR_DIR")]
    pub files: Vec<PathBuf>,
    /// Format.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    /// Amazon EC2, as the controller has it.
    #[command(flatten)]
    pub aws: AwsArgs,
}

/// How the findings are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// For programs.
    Json,
}

/// Runs the command: prints the findings on `out` and returns the exit code: 0 when nothing failed, 1 when something did.
///
/// # Errors
/// Settings, manifests or a kubeconfig that can't be used; `out` can't be written to.
pub fn run(args: &PreflightArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    // Whoever installed a provider before us chose it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    runtime.block_on(check(args, out))
}

async fn check(args: &PreflightArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    let options = args.aws.options(&args.cluster_name)?;
    let (classes, pools) = manifests(&args.files)?;
    let (kube, classes, pools, origin) = if args.files.is_empty() {
        let config = kube::Config::infer()
            .await
            .context("no manifests and no access to a cluster: name manifests by --file, or set KUBECONFIG")?;
        let client = kube::Client::try_from(config).context("making a client of the API server")?;
        let api: Api<Ec2NodeClass> = Api::all(client.clone());
        let listed = api.list(&kube::api::ListParams::default()).await;
        let listed =
            listed.context("the EC2NodeClasses of the cluster could not be listed: name manifests by --file")?;
        // Without them only the quotas of standard instances are looked at.
        let pools = Api::<NodePool>::all(client.clone()).list(&kube::api::ListParams::default()).await;
        (Some(client), listed.items, pools.map(|pools| pools.items).unwrap_or_default(), Origin::Cluster)
    } else {
        // Only asked for what neither the settings nor EKS tell.
        let config = kube::Config::infer().await.ok();
        (config.and_then(|config| kube::Client::try_from(config).ok()), classes, pools, Origin::Files)
    };
    let instead = Instead { region: args.region.clone(), role: args.role.clone(), attempts: Some(ATTEMPTS) };
    let clients = Clients::connect(instead).await?;
    let findings = Box::pin(preflight::check(&clients, &options, kube.as_ref(), origin, &classes, &pools)).await;
    match args.output {
        Output::Table => report::table(&findings, out),
        Output::Json => report::json(&findings, &clients.region, &args.cluster_name, out),
    }
    .context("writing the findings")?;
    Ok(if findings.iter().any(|finding| finding.result == Grade::Failed) { UNFIT } else { FIT })
}

/// The node classes of manifests, by name, and the NodePools.
fn manifests(files: &[PathBuf]) -> anyhow::Result<(Vec<Ec2NodeClass>, Vec<NodePool>)> {
    let mut input = Input::with_default_spread(DefaultSpread::default());
    for file in files {
        input.read_manifests(file)?;
    }
    let classes: BTreeMap<String, Ec2NodeClass> = input.node_classes;
    if !files.is_empty() && classes.is_empty() {
        bail!("there is no EC2NodeClass in the manifests: name the right ones by --file");
    }
    if classes.values().any(|class| class.name_any().is_empty()) {
        bail!("an EC2NodeClass in the manifests has no name: set metadata.name");
    }
    Ok((classes.into_values().collect(), input.pools.into_iter().map(|(_, pool)| pool).collect()))
}
