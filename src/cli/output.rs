//! Renders a plan as JSON and as a table.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use serde::Serialize;
use stowage_model::units::MicroUsd;
use stowage_planner::{Choice, Plan, PlannedNode, Problem};

/// The JSON form of a plan.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JsonPlan<'p> {
    nodes: Vec<JsonNode<'p>>,
    existing: Vec<JsonExisting<'p>>,
    unschedulable: Vec<JsonUnschedulable<'p>>,
    cost_usd_per_hour: f64,
    lower_bound_usd_per_hour: Option<f64>,
    gap_percent: Option<f64>,
    optimal: bool,
    /// Until the plan can be launched.
    solve_seconds: f64,
    /// Of the proof of its bound after that.
    prove_seconds: f64,
}

/// How long a plan took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Until it can be launched.
    pub solve: Duration,
    /// Of the proof of its bound after that; zero if there is none to make.
    pub prove: Duration,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonOffering<'p> {
    instance_type: &'p str,
    zone: &'p str,
    capacity_type: &'static str,
    price_usd_per_hour: f64,
}

impl<'p> JsonOffering<'p> {
    fn of(choice: &'p Choice) -> Self {
        Self {
            instance_type: &choice.instance_type.name,
            zone: &choice.zone,
            capacity_type: choice.capacity_type.as_str(),
            price_usd_per_hour: choice.price.usd(),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonNode<'p> {
    node_pool: &'p str,
    #[serde(flatten)]
    offering: JsonOffering<'p>,
    /// Requests of pods and daemons in percent of the allocatable resource.
    cpu_percent: f64,
    memory_percent: f64,
    /// Number of other instance types that fit the same pods.
    alternatives: usize,
    /// The cheapest offering of another type.
    next_best: Option<JsonOffering<'p>>,
    pods: Vec<&'p str>,
}

#[derive(Serialize)]
struct JsonExisting<'p> {
    node: &'p str,
    pods: Vec<&'p str>,
}

#[derive(Serialize)]
struct JsonUnschedulable<'p> {
    pod: &'p str,
    reason: &'p str,
}

/// The JSON form of a plan; the contract of `stowage simulate --output json`.
pub fn json<'p>(problem: &'p Problem, plan: &'p Plan, times: Times) -> JsonPlan<'p> {
    let keys = |pods: &[usize]| pods.iter().map(|pod| problem.pods[*pod].key.as_ref()).collect();
    let node = |node: &'p PlannedNode| {
        let (cpu_percent, memory_percent) = filled(node)?;
        Some(JsonNode {
            node_pool: &problem.pools[node.pool].name,
            offering: JsonOffering::of(node.choices.first()?),
            cpu_percent,
            memory_percent,
            alternatives: alternatives(node),
            next_best: next_best(node).map(JsonOffering::of),
            pods: keys(&node.pods),
        })
    };
    JsonPlan {
        nodes: plan.new_nodes.iter().filter_map(node).collect(),
        existing: plan
            .placements
            .iter()
            .map(|p| JsonExisting { node: &problem.nodes[p.node].name, pods: keys(&p.pods) })
            .collect(),
        unschedulable: plan
            .unschedulable
            .iter()
            .map(|u| JsonUnschedulable { pod: &problem.pods[u.pod].key, reason: &u.reason })
            .collect(),
        cost_usd_per_hour: plan.cost.usd(),
        lower_bound_usd_per_hour: plan.lower_bound.map(MicroUsd::usd),
        gap_percent: gap_percent(plan),
        optimal: plan.optimal,
        solve_seconds: times.solve.as_secs_f64(),
        prove_seconds: times.prove.as_secs_f64(),
    }
}

/// Gap between the cost of a plan and its lower bound, in percent of the bound.
pub fn gap_percent(plan: &Plan) -> Option<f64> {
    let bound = plan.lower_bound.filter(|bound| bound.0 > 0)?;
    Some((plan.cost.usd() / bound.usd() - 1.0) * 100.0)
}

/// CPU and memory requests of pods and daemons in percent of the planned type's allocatable resources.
pub fn filled(node: &PlannedNode) -> Option<(f64, f64)> {
    let allocatable = &node.choices.first()?.instance_type.allocatable;
    #[allow(clippy::cast_precision_loss)]
    let percent = |part: i64, whole: i64| if whole > 0 { part as f64 * 100.0 / whole as f64 } else { 0.0 };
    let requests = &node.requests;
    Some((percent(requests.cpu.0, allocatable.cpu.0), percent(requests.memory.0, allocatable.memory.0)))
}

/// The cheapest offering of another instance type that fits the same pods.
pub fn next_best(node: &PlannedNode) -> Option<&Choice> {
    let planned = node.choices.first()?;
    node.choices.iter().find(|choice| choice.instance_type.name != planned.instance_type.name)
}

fn alternatives(node: &PlannedNode) -> usize {
    let mut names: Vec<&str> = node.choices.iter().map(|choice| &*choice.instance_type.name).collect();
    names.sort_unstable();
    names.dedup();
    names.len().saturating_sub(1)
}

/// The new nodes of one offering.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Number of nodes.
    pub nodes: usize,
    /// Number of pods on them.
    pub pods: usize,
    /// Sums of [`filled`], percent.
    filled: (f64, f64),
    /// The cheapest alternative type and its price.
    next: Option<(String, MicroUsd)>,
}

impl Row {
    /// Mean requested CPU and memory, in percent.
    pub fn mean_filled(&self) -> (f64, f64) {
        #[allow(clippy::cast_precision_loss)]
        let nodes = self.nodes.max(1) as f64;
        (self.filled.0 / nodes, self.filled.1 / nodes)
    }

    /// The cheapest other type that fits the pods of at least one node of the group, with its price.
    pub fn next_best(&self) -> String {
        self.next.as_ref().map_or_else(|| "none".into(), |(name, price)| format!("{name} at {:.4}", price.usd()))
    }
}

/// NodePool, instance type, zone, capacity type, price.
pub type Kind<'p> = (&'p str, &'p str, &'p str, &'static str, MicroUsd);

/// New nodes by offering.
pub fn rows<'p>(problem: &'p Problem, plan: &'p Plan) -> BTreeMap<Kind<'p>, Row> {
    let mut rows: BTreeMap<Kind<'p>, Row> = BTreeMap::new();
    for node in &plan.new_nodes {
        let (Some(choice), Some(filled)) = (node.choices.first(), filled(node)) else { continue };
        let kind = (
            &*problem.pools[node.pool].name,
            &*choice.instance_type.name,
            &*choice.zone,
            choice.capacity_type.as_str(),
            choice.price,
        );
        let row = rows.entry(kind).or_default();
        row.nodes += 1;
        row.pods += node.pods.len();
        row.filled = (row.filled.0 + filled.0, row.filled.1 + filled.1);
        if let Some(next) = next_best(node)
            && row.next.as_ref().is_none_or(|(_, price)| next.price < *price)
        {
            row.next = Some((next.instance_type.name.to_string(), next.price));
        }
    }
    rows
}

/// Unschedulable pods, by reason.
pub fn reasons<'p>(problem: &'p Problem, plan: &'p Plan) -> BTreeMap<&'p str, Vec<&'p str>> {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for u in &plan.unschedulable {
        reasons.entry(&u.reason).or_default().push(&problem.pods[u.pod].key);
    }
    reasons
}

/// Number of pods that the plan places.
pub fn placed(plan: &Plan) -> usize {
    let new: usize = plan.new_nodes.iter().map(|node| node.pods.len()).sum();
    new + plan.placements.iter().map(|placement| placement.pods.len()).sum::<usize>()
}

/// Writes the plan as a table.
///
/// # Errors
/// `out` cannot be written to.
pub fn table(problem: &Problem, plan: &Plan, times: Times, out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(
        out,
        "{:>6}  {:<16} {:<20} {:<12} {:<10} {:>12} {:>7} {:>5} {:>5}  NEXT BEST",
        "NODES", "POOL", "TYPE", "ZONE", "CAPACITY", "USD/H EACH", "PODS", "CPU%", "MEM%"
    )?;
    for ((pool, instance_type, zone, capacity, price), row) in rows(problem, plan) {
        let (cpu, memory) = row.mean_filled();
        writeln!(
            out,
            "{:>6}  {pool:<16} {instance_type:<20} {zone:<12} {capacity:<10} {:>12.4} {:>7} {cpu:>5.0} {memory:>5.0}  {}",
            row.nodes,
            price.usd(),
            row.pods,
            row.next_best()
        )?;
    }
    for placement in &plan.placements {
        writeln!(out, "{:>6}  onto {}: {} pods", "", problem.nodes[placement.node].name, placement.pods.len())?;
    }
    write!(
        out,
        "\n{} of {} pods placed, {} nodes to buy, {:.4} USD/h",
        placed(plan),
        problem.pods.len(),
        plan.new_nodes.len(),
        plan.cost.usd()
    )?;
    if let (Some(bound), Some(gap)) = (plan.lower_bound, gap_percent(plan)) {
        let optimal = if plan.optimal { ", optimal" } else { "" };
        write!(out, ", lower bound {:.4} (gap {gap:.1} %{optimal})", bound.usd())?;
    }
    write!(out, ", planned in {:.1} ms", times.solve.as_secs_f64() * 1e3)?;
    if !times.prove.is_zero() {
        write!(out, ", then proof in {:.1} ms", times.prove.as_secs_f64() * 1e3)?;
    }
    writeln!(out)?;
    for (reason, pods) in reasons(problem, plan) {
        let (first, more) = (pods[0], pods.len() - 1);
        let others = if more == 0 { String::new() } else { format!(" and {more} more") };
        writeln!(out, "unschedulable: {first}{others}: {reason}")?;
    }
    Ok(())
}
