//! `stowage simulate`: runs the planner offline. Reads a scenario or manifests, plans, prints the plan.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use clap::{Args, ValueEnum};

use crate::cli::aws::gate;
use crate::cli::manifests::{Input, InputError};
use crate::cli::planning::PlanArgs;
use crate::cli::{output, page};
use crate::cloud::catalog::{EBS_DRIVER, NodeSettings, RawCatalog, SpotPricing, embedded, parse};
use crate::model::labels;
use crate::model::labels::normalize_key;
use crate::model::offering::Catalog;
use crate::model::resources::Resources;
use crate::model::units::MicroUsd;
use crate::planner::columns::table::ColumnCache;
use crate::planner::input::node::NodeState;
use crate::planner::input::pod::NodePods;
use crate::planner::input::pool::Pool;
use crate::planner::input::problem::Problem;
use crate::planner::plan;

/// Every pod fits.
const ALL_FIT: u8 = 0;
/// The input is invalid.
const BAD_INPUT: u8 = 2;
/// Some pods are unschedulable.
const SOME_DO_NOT_FIT: u8 = 3;

/// Arguments of `stowage simulate`.
#[derive(Args, Debug, Clone)]
pub struct SimulateArgs {
    /// Scenario: {"nodePools": [...], "pods": [...], "nodes": [...], "daemonSets": [...]} in Kubernetes JSON.
    #[arg(long, value_name = "FILE", required_unless_present = "manifests", conflicts_with = "manifests")]
    pub scenario: Option<PathBuf>,
    /// Manifests: a YAML or JSON file, or a directory of them. May be repeated.
    #[arg(short = 'f', long = "filename", value_name = "FILE_OR_DIR")]
    pub manifests: Vec<PathBuf>,
    /// Catalog of instance types [default: embedded].
    #[arg(long, value_name = "FILE")]
    pub catalog: Option<PathBuf>,
    /// Spot price as a fraction of the on-demand price; 0 offers no spot capacity.
    #[arg(long, value_name = "R", default_value_t = 0.0)]
    pub spot_ratio: f64,
    /// Feature gates of the AWS provider, such as NodeClassCEL=true (CEL expressions in kubelet configurations); unknown gates are ignored.
    #[arg(long, env = "AWS_FEATURE_GATES", default_value = "NodeClassCEL=false")]
    pub aws_feature_gates: String,
    /// Planner settings.
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Output format.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
}

/// `--output`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Table
    Table,
    /// JSON
    Json,
    /// Self-contained HTML page
    Html,
}

/// Runs the command: prints the plan on `out` and returns the exit code: 0 when all pods fit, 3 when some don't, 2 when
/// the input can't be used (then the file, the object and the field are named on standard error).
///
/// # Errors
/// `out` can't be written to.
pub fn run(args: &SimulateArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    let (problem, skipped) = match read(args) {
        Ok(read) => read,
        Err(error) => {
            eprintln!("error: {error:#}");
            return Ok(BAD_INPUT);
        }
    };
    for (kind, count) in skipped {
        eprintln!("skipped {count} {kind}");
    }
    let start = Instant::now();
    let found = plan(&problem, &ColumnCache::default());
    let seconds = start.elapsed().as_secs_f64();
    match args.output {
        Output::Json => {
            serde_json::to_writer(&mut *out, &output::json(&problem, &found, seconds)).context("writing the plan")?;
            writeln!(out)?;
        }
        Output::Table => output::table(&problem, &found, seconds, out).context("writing the plan")?,
        Output::Html => page::write(&problem, &found, seconds, out).context("writing the plan")?,
    }
    Ok(if found.unschedulable.is_empty() { ALL_FIT } else { SOME_DO_NOT_FIT })
}

fn read(args: &SimulateArgs) -> anyhow::Result<(Problem, BTreeMap<String, usize>)> {
    let parsed = match &args.catalog {
        Some(file) => {
            let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
            Some(parse(&text).with_context(|| file.display().to_string())?)
        }
        None => None,
    };
    let raw: &RawCatalog = match &parsed {
        Some(raw) => raw,
        None => embedded(),
    };
    let spot = SpotPricing::ratio(args.spot_ratio).context("--spot-ratio")?;
    let mut input = Input::with_default_spread(args.plan.scheduler_config.clone());
    if let Some(file) = &args.scenario {
        input.read_scenario(file)?;
    }
    for path in &args.manifests {
        input.read_manifests(path)?;
    }
    for class in input.assume_classes(EBS_DRIVER) {
        eprintln!("assumed StorageClass {class}: volumes of EBS, made where the pod goes, in any zone");
    }
    let with_expressions = gate(&args.aws_feature_gates, "NodeClassCEL").unwrap_or(false);
    let (mut problem, skipped) = problem_of(input, raw, spot, with_expressions)?;
    problem.settings = args.plan.settings();
    Ok((problem, skipped))
}

fn problem_of(
    input: Input,
    raw: &RawCatalog,
    spot: SpotPricing,
    with_expressions: bool,
) -> anyhow::Result<(Problem, BTreeMap<String, usize>)> {
    let mut catalogs: BTreeMap<String, Arc<Catalog>> = BTreeMap::new();
    let settings = |name: &str| {
        let class = input.node_classes.get(name);
        let Some(class) = class.filter(|_| with_expressions) else { return NodeSettings::of(class) };
        let settings = NodeSettings::of(Some(class)).with_expressions(class);
        let trial = settings.try_on(&raw.instance_types);
        if let Some(unusable) = &trial.failed {
            eprintln!("EC2NodeClass {name}: {unusable}; nothing can be bought for its nodes");
        } else if let Some(unusable) = &trial.dropped {
            eprintln!("EC2NodeClass {name}: {unusable}; what it would reserve counts as not set");
        }
        settings
    };
    let mut problem = Problem {
        daemons: input.daemons,
        namespaces: Arc::new(input.namespaces),
        pods: input.pods,
        ..Problem::default()
    };
    problem.volumes = Arc::new(input.volumes);
    problem.services = Arc::new(input.services);
    let mut running = input.running;
    let mut usage: BTreeMap<String, (Resources, i64)> = BTreeMap::new();
    for node in input.nodes {
        let name = node.metadata.name.clone().unwrap_or_default();
        let fail = |error: crate::model::resources::ResourceError| {
            anyhow::anyhow!("Node {name}: status: resource {}: {}", error.resource, error.source)
        };
        let status = node.status.unwrap_or_default();
        let spec = node.spec.unwrap_or_default();
        let allocatable = status.allocatable.as_ref().or(status.capacity.as_ref());
        let allocatable = allocatable.map(Resources::from_map).transpose().map_err(fail)?.unwrap_or_default();
        let capacity = status.capacity.as_ref().map(Resources::from_map).transpose().map_err(fail)?;
        let mut node_labels: BTreeMap<String, String> = BTreeMap::new();
        for (key, value) in node.metadata.labels.unwrap_or_default() {
            node_labels.entry(normalize_key(&key).to_owned()).or_insert(value);
        }
        if let Some(pool) = node_labels.get(labels::NODE_POOL) {
            let used = usage.entry(pool.clone()).or_default();
            used.0.add(capacity.as_ref().unwrap_or(&allocatable));
            used.1 += 1;
        }
        let mut state = NodeState {
            name: Arc::from(name.as_str()),
            taints: spec.taints.unwrap_or_default(),
            allocatable,
            pods: NodePods::default(),
            daemon_reserve: Resources::default(),
            daemons: Vec::new(),
            schedulable: spec.unschedulable != Some(true),
            initialized: true,
            price: MicroUsd(0),
            labels: node_labels,
        };
        for daemon in &problem.daemons {
            if daemon.class.requests.may_run_on(&state.allocatable)
                && daemon.class.accepts_node(&state.labels, &name)
                && daemon.class.untolerated(&state.taints).is_none()
            {
                state.daemon_reserve.add(&daemon.class.requests);
                // If the DaemonSet's pod already runs there, the ports are in use either way.
                state.daemons.extend(Some(&daemon.class).filter(|class| !class.host_ports.is_empty()).cloned());
            }
        }
        let mut present = Resources::default();
        for pod in running.remove(&name).unwrap_or_default() {
            if pod.daemon {
                present.add(&pod.pod.class.requests);
            }
            state.pods.push(pod.pod);
        }
        state.daemon_reserve.sub(&present);
        state.daemon_reserve.raise_to(&Resources::default());
        problem.nodes.push(Arc::new(state));
    }
    for (file, node_pool) in &input.pools {
        let class_name = &node_pool.spec.template.spec.node_class_ref.name;
        let catalog = catalogs
            .entry(class_name.clone())
            .or_insert_with(|| Arc::new(raw.with_settings(&settings(class_name), spot)));
        let name = node_pool.metadata.name.clone().unwrap_or_default();
        let (used, nodes) = usage.get(&name).cloned().unwrap_or_default();
        let pool = Pool::new(node_pool, Arc::clone(catalog), used, nodes).map_err(|error| InputError::Object {
            file: file.clone(),
            object: format!("NodePool {name}"),
            problem: error.problem.to_string(),
        })?;
        problem.pools.push(pool);
    }
    Ok((problem, input.skipped))
}
