//! `stowage simulate`: runs the planner offline. Reads a scenario or manifests, plans, prints the plan.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, ValueEnum};
use stowage_api::NodePool;
use stowage_api::conditions::READY;
use stowage_cloud::catalog::{EBS_DRIVER, NodeSettings, RawCatalog, SpotPricing, embedded, parse};
use stowage_model::labels;
use stowage_model::labels::normalize_key;
use stowage_model::offering::{CapacityType, Catalog};
use stowage_model::resources::Resources;
use stowage_model::units::MicroUsd;
use stowage_planner::{ColumnCache, NodePods, NodeState, PlanSettings, Pool, Problem, Tenure, plan};

use crate::cli::aws::gate;
use crate::cli::manifests::{Input, InputError};
use crate::cli::output::Times;
use crate::cli::planning::PlanArgs;
use crate::cli::{output, page};

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
    /// Spend up to some seconds on cheaper nodes than the service would find, and on a lower bound that proves more about the plan.
    #[arg(long)]
    pub prove: bool,
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
    let mut found = plan(&problem, &ColumnCache::default());
    let (solve, is_unproven) = (start.elapsed(), found.proof.is_some());
    found.prove();
    let prove = if is_unproven { start.elapsed().saturating_sub(solve) } else { Duration::ZERO };
    let times = Times { solve, prove };
    match args.output {
        Output::Json => {
            serde_json::to_writer(&mut *out, &output::json(&problem, &found, times)).context("writing the plan")?;
            writeln!(out)?;
        }
        Output::Table => output::table(&problem, &found, times, out).context("writing the plan")?,
        Output::Html => page::write(&problem, &found, times, out).context("writing the plan")?,
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
    problem.settings = PlanSettings { prove: args.prove, ..args.plan.settings() };
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
    // Every namespace has its name as a label.
    let mut namespaces = input.namespaces;
    let of_pods = input.pods.iter().chain(input.running.values().flatten().map(|running| &running.pod));
    for name in of_pods.map(|pod| pod.class.namespace.as_ref()) {
        if !namespaces.contains_key(name) {
            namespaces.insert(name.to_owned(), BTreeMap::new());
        }
    }
    for (name, labels) in &mut namespaces {
        labels.insert("kubernetes.io/metadata.name".to_owned(), name.clone());
    }
    let mut problem =
        Problem { daemons: input.daemons, namespaces: Arc::new(namespaces), pods: input.pods, ..Problem::default() };
    problem.volumes = Arc::new(input.volumes);
    problem.services = Arc::new(input.services);
    let mut running = input.running;
    let mut usage: BTreeMap<String, (Resources, i64)> = BTreeMap::new();
    let mut nodes_of: BTreeMap<String, Vec<BTreeMap<String, String>>> = BTreeMap::new();
    for node in input.nodes {
        let name = node.metadata.name.clone().unwrap_or_default();
        let fail = |error: stowage_model::resources::ResourceError| {
            anyhow::anyhow!("Node {name}: status: resource {}: {}", error.resource, error.source)
        };
        let status = node.status.unwrap_or_default();
        let spec = node.spec.unwrap_or_default();
        let is_leaving = node.metadata.deletion_timestamp.is_some();
        let not_ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status != "True");
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
            nodes_of.entry(pool.clone()).or_default().push(node_labels.clone());
        }
        let mut state = NodeState {
            name: Arc::from(name.as_str()),
            taints: spec.taints.unwrap_or_default(),
            allocatable,
            pods: NodePods::default(),
            daemon_reserve: Resources::default(),
            daemons: Vec::new(),
            schedulable: spec.unschedulable != Some(true) && !is_leaving && !not_ready,
            initialized: true,
            price: MicroUsd(0),
            tenure: Tenure::NotOurs,
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
    let mut skipped = input.skipped;
    for (file, node_pool) in &input.pools {
        if let Some(why) = launches_nothing(node_pool) {
            *skipped.entry(why.to_owned()).or_default() += 1;
            continue;
        }
        let class_name = &node_pool.spec.template.spec.node_class_ref.name;
        let catalog = catalogs
            .entry(class_name.clone())
            .or_insert_with(|| Arc::new(raw.with_settings(&settings(class_name), spot)));
        let name = node_pool.metadata.name.clone().unwrap_or_default();
        let (mut used, nodes) = usage.get(&name).cloned().unwrap_or_default();
        if node_pool.spec.limits.as_ref().is_some_and(|limits| limits.contains_key(labels::USD_PER_HOUR)) {
            let prices = nodes_of.get(&name).into_iter().flatten().map(|labels| price_of(labels, catalog).0);
            used.set(labels::USD_PER_HOUR, prices.fold(0, i64::saturating_add));
        }
        let pool = Pool::new(node_pool, Arc::clone(catalog), used, nodes).map_err(|error| InputError::Object {
            file: file.clone(),
            object: format!("NodePool {name}"),
            problem: error.problem.to_string(),
        })?;
        problem.pools.push(pool);
    }
    Ok((problem, skipped))
}

/// The hourly price of a node by its labels; zero when unknown.
fn price_of(node_labels: &BTreeMap<String, String>, catalog: &Catalog) -> MicroUsd {
    let of = || {
        let [name, zone, capacity_type] =
            [labels::INSTANCE_TYPE, labels::ZONE, labels::CAPACITY_TYPE].map(|key| node_labels.get(key));
        let (name, zone, capacity_type) = (name?, zone?, CapacityType::parse(capacity_type?)?);
        let found = catalog.instance_types.iter().find(|found| *found.name == **name)?;
        found.price(zone, capacity_type)
    };
    of().unwrap_or_default()
}

/// Why a NodePool launches no node for pending pods, as the service decides it. A NodePool without status counts as ready.
fn launches_nothing(pool: &NodePool) -> Option<&'static str> {
    let not_ready = pool.status.iter().flat_map(|s| &s.conditions).any(|c| c.type_ == READY && c.status != "True");
    if pool.metadata.deletion_timestamp.is_some() {
        Some("NodePool (being deleted)")
    } else if pool.spec.replicas.is_some() {
        Some("NodePool (static)")
    } else if not_ready {
        Some("NodePool (not ready)")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn problem(objects: &[Value]) -> (Problem, BTreeMap<String, usize>) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("objects.json");
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        std::fs::write(&file, list.to_string()).unwrap();
        let mut input = Input::default();
        input.read_manifests(&file).unwrap();
        problem_of(input, embedded(), SpotPricing::ratio(0.0).unwrap(), false).unwrap()
    }

    fn pool(name: &str, metadata: &Value, spec: &Value, status: &Value) -> Value {
        let template = json!({"spec": {"requirements": [], "nodeClassRef":
            {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}}});
        let mut out = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": metadata, "spec": spec, "status": status});
        out["metadata"]["name"] = json!(name);
        out["spec"]["template"] = template;
        out
    }

    fn ready(status: &str) -> Value {
        json!({"conditions": [{"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z",
            "reason": "r", "message": ""}]})
    }

    #[test]
    fn node_pools_that_the_service_does_not_use_are_skipped() {
        let deleting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let (problem, skipped) = problem(&[
            pool("plain", &json!({}), &json!({}), &json!({})),
            pool("ready", &json!({}), &json!({}), &ready("True")),
            pool("deleting", &deleting, &json!({}), &ready("True")),
            pool("waiting", &json!({}), &json!({}), &ready("Unknown")),
            pool("fixed", &json!({}), &json!({"replicas": 2}), &ready("True")),
        ]);
        let names: Vec<&str> = problem.pools.iter().map(|pool| &*pool.name).collect();
        assert_eq!(names, ["plain", "ready"]);
        let kinds: Vec<&str> = skipped.keys().map(String::as_str).collect();
        assert_eq!(kinds, ["NodePool (being deleted)", "NodePool (not ready)", "NodePool (static)"]);
    }

    #[test]
    fn nodes_that_are_leaving_or_not_ready_get_no_pods() {
        let node = |name: &str, metadata: Value, status: Value| {
            let mut out =
                json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status});
            out["metadata"]["name"] = json!(name);
            out
        };
        let (problem, _) = problem(&[
            node("a", json!({}), json!({})),
            node("b", json!({}), ready("True")),
            node("c", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}), ready("True")),
            node("d", json!({}), ready("Unknown")),
        ]);
        let schedulable: Vec<bool> = problem.nodes.iter().map(|node| node.schedulable).collect();
        assert_eq!(schedulable, [true, true, false, false]);
    }

    #[test]
    fn namespaces_have_their_name_as_a_label() {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "a", "labels": {"tier": "x"}}});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "b"}, "spec": {"containers": []}});
        let (problem, _) = problem(&[namespace, pod]);
        let label = |namespace: &str| problem.namespaces[namespace].get("kubernetes.io/metadata.name").cloned();
        assert_eq!((label("a").as_deref(), label("b").as_deref()), (Some("a"), Some("b")));
    }
}
