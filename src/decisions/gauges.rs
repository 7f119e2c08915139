//! What the gauges of NodePools, nodes and waiting pods show, with Karpenter's labels (Karpenter core reference 8).

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use stowage_api::conditions::{CONSOLIDATABLE, DRIFTED};
use stowage_model::labels;
use stowage_model::quantity::parse_amount;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;

use crate::decisions::disruption::budget::allowed;
use crate::decisions::disruption::candidates::{candidates, counted};
use crate::decisions::disruption::node_facts::Facts;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::node_usage::NodeUsage;
use crate::state::object_ext::NodeClaimExt;
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// The reasons that budgets know.
const REASONS: [DisruptionReason; 3] =
    [DisruptionReason::Underutilized, DisruptionReason::Empty, DisruptionReason::Drifted];
/// Nodes that may be disrupted where no budget applies, as Karpenter says it.
const UNBOUNDED: i64 = i32::MAX as i64;

/// Values by their labels.
pub type Series<const N: usize> = BTreeMap<[String; N], f64>;

/// The values of the gauges.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gauges {
    /// By resource and NodePool; CPU in cores.
    pub usage: Series<2>,
    pub limits: Series<2>,
    /// Nodes by NodePool and reason.
    pub allowed: Series<2>,
    pub consuming: Series<2>,
    /// USD per hour by NodePool.
    pub cost: Series<1>,
    /// USD per hour by NodePool, capacity type and whether pods use the node: `true` or `false`.
    pub usd_per_hour: Series<3>,
    /// Waiting pods by controller and zone.
    pub pending_by_zone: Series<2>,
    /// By reason.
    pub eligible: Series<1>,
    /// Percent by resource.
    pub utilization: Series<1>,
}

impl Gauges {
    /// The values at `now`.
    pub fn of(state: &ClusterState, holds: &Holds, facts: &Facts, now: UnixMillis) -> Self {
        let mut out = Self::default();
        for (name, pool) in &state.pools {
            let status = pool.status.as_ref();
            out.usage.extend(by_resource(status.map(|status| &status.resources), name));
            out.limits.extend(by_resource(pool.spec.limits.as_ref(), name));
            let (nodes, consuming) = counted(state, name);
            for reason in REASONS {
                let allowed = allowed(&pool.spec.disruption.budgets, reason, nodes, 0, now).min(UNBOUNDED);
                let labels = || [name.clone(), reason.as_str().to_owned()];
                out.allowed.insert(labels(), float(allowed));
                out.consuming.insert(labels(), float(consuming));
            }
            out.cost.insert([name.clone()], 0.0);
        }
        let mut prices: BTreeMap<(&str, &str, bool), MicroUsd> = BTreeMap::new();
        for node in &facts.nodes {
            let claim = state.claims.get(&node.claim);
            let kind = claim.and_then(|claim| claim.metadata.labels.as_ref()?.get(labels::CAPACITY_TYPE));
            let key = (&*node.pool, kind.map_or("", String::as_str), node.pod_count > 0);
            prices.entry(key).or_default().0 += node.price.0;
            // That nothing is paid for nodes without pods is worth a series.
            prices.entry((key.0, key.1, !key.2)).or_default();
        }
        for ((pool, kind, is_used), price) in prices {
            out.usd_per_hour.insert([pool.to_owned(), kind.to_owned(), is_used.to_string()], price.usd());
            *out.cost.entry([pool.to_owned()]).or_default() += price.usd();
        }
        out.eligible = eligible(state, holds, facts);
        out.utilization = utilization(state, facts);
        out
    }
}

/// A resource list with Karpenter's names of the resources, of a NodePool.
fn by_resource<'q>(
    list: Option<&'q BTreeMap<String, Quantity>>,
    pool: &'q str,
) -> impl Iterator<Item = ([String; 2], f64)> + 'q {
    let amount = move |(name, quantity): (&String, &Quantity)| {
        let amount = parse_amount(name, &quantity.0).ok()?;
        Some(([resource_type(name), pool.to_owned()], in_units(name, amount)))
    };
    list.into_iter().flatten().filter_map(amount)
}

/// Karpenter's name of a resource in labels.
pub fn resource_type(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
}

/// An amount in cores, bytes, USD per hour or units.
pub fn in_units(resource: &str, amount: i64) -> f64 {
    match resource {
        "cpu" => float(amount) / 1_000.0,
        labels::USD_PER_HOUR => MicroUsd(amount).usd(),
        _ => float(amount),
    }
}

/// Nodes that may be disrupted but for budgets, by reason: empty ones and quiet ones that are not protected, and drifted ones.
fn eligible(state: &ClusterState, holds: &Holds, facts: &Facts) -> Series<1> {
    let mut counts = REASONS.map(|_| 0);
    for candidate in candidates(state, holds, facts) {
        let Some(claim) = state.claims.get(&candidate.facts.claim) else { continue };
        if candidate.facts.protection.is_some() {
            continue;
        }
        let is_quiet = claim.has_condition(CONSOLIDATABLE);
        let is_empty = is_quiet && candidate.pods == 0;
        for (count, applies) in counts.iter_mut().zip([is_quiet, is_empty, claim.has_condition(DRIFTED)]) {
            *count += i64::from(applies);
        }
    }
    REASONS.iter().zip(counts).map(|(reason, count)| ([reason.metric_label().to_owned()], float(count))).collect()
}

/// The share of what all nodes have that their pods request.
fn utilization(state: &ClusterState, facts: &Facts) -> Series<1> {
    let (mut allocatable, mut requested) = (Resources::default(), Resources::default());
    for node in &facts.nodes {
        allocatable.add(&node.allocatable);
        requested.add(&node.allocatable);
        requested.sub(&node.free);
    }
    for node in state.nodes.values().filter(|node| state.claim_of(node).is_none()) {
        let usage = NodeUsage::of(state, node);
        allocatable.add(&usage.allocatable);
        requested.add(&usage.requests);
    }
    let has_some = allocatable.iter().filter(|(_, amount)| *amount > 0);
    let share =
        |(name, amount): (&str, i64)| ([resource_type(name)], 100.0 * float(requested.get(name)) / float(amount));
    has_some.map(share).collect()
}

// Amounts of one cluster are far below 2^53.
#[allow(clippy::cast_precision_loss)]
fn float(amount: i64) -> f64 {
    amount as f64
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::labels::DO_NOT_DISRUPT;

    use super::*;
    use crate::test_support::small_cluster::{NOW, SmallCluster};

    fn gauges(cluster: &SmallCluster) -> Gauges {
        Gauges::of(&cluster.state, &Holds::default(), &cluster.facts(), NOW)
    }

    /// `a, b: 1` for each of the series.
    fn lines<const N: usize>(series: &Series<N>) -> Vec<String> {
        series.iter().map(|(labels, value)| format!("{}: {value}", labels.join(", "))).collect()
    }

    /// Adds the conditions to the status of a claim.
    fn with_conditions(cluster: &mut SmallCluster, claim: &str, kinds: &[&str]) {
        let mut changed = serde_json::to_value(&*cluster.state.claims[claim]).unwrap();
        let conditions = changed["status"]["conditions"].as_array_mut().unwrap();
        let at = NOW.rfc3339();
        let condition = |kind: &&str| json!({"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": at});
        conditions.extend(kinds.iter().map(condition));
        cluster.state.apply_claim(serde_json::from_value(changed).unwrap());
    }

    #[test]
    fn a_pool_shows_its_usage_limits_and_cost() {
        let limits = json!({"cpu": "500m", "memory": "1Ki", "nodes": "7", "example.com/fpga-card": "x",
            (labels::USD_PER_HOUR): "2.5"});
        let resources = json!({"cpu": "10", "ephemeral-storage": "2Gi", "nodes": "3", (labels::USD_PER_HOUR): "0.48"});
        let pool = json!({"spec": {"limits": limits}, "status": {"resources": resources}});
        let mut cluster = SmallCluster::new(&[("p", pool), ("q", json!({}))]);
        cluster.add_node("n1", "p", "small/spot");
        cluster.add_node("n2", "p", "large/on-demand");
        cluster.add_node("n3", "p", "small/spot");
        cluster.add_pod("a", Some("n1"), "1", &json!({}));
        let gauges = gauges(&cluster);
        assert_eq!(
            lines(&gauges.limits),
            ["cpu, p: 0.5", "memory, p: 1024", "nodes, p: 7", "stowage.dev/usd_per_hour, p: 2.5"],
            "what is no quantity is left out"
        );
        assert_eq!(
            lines(&gauges.usage),
            ["cpu, p: 10", "ephemeral_storage, p: 2147483648", "nodes, p: 3", "stowage.dev/usd_per_hour, p: 0.48"]
        );
        assert_eq!(lines(&gauges.cost), ["p: 0.48", "q: 0"]);
        let by_type =
            ["p, on-demand, false: 0.4", "p, on-demand, true: 0", "p, spot, false: 0.04", "p, spot, true: 0.04"];
        assert_eq!(lines(&gauges.usd_per_hour), by_type);
    }

    #[test]
    fn budgets_show_what_they_allow_and_what_consumes_them() {
        let budgets = json!([{"nodes": "50%"}, {"nodes": "0", "reasons": ["Drifted"]}]);
        let mut cluster = SmallCluster::new(&[
            ("p", json!({"spec": {"disruption": {"budgets": budgets}}})),
            ("unbounded", json!({"spec": {"disruption": {"budgets": []}}})),
        ]);
        for name in ["n1", "n2", "n3"] {
            cluster.add_node(name, "p", "small/spot");
        }
        let mut not_ready = (*cluster.state.nodes["n2"]).clone();
        not_ready.status.as_mut().unwrap().conditions.as_mut().unwrap()[0].status = "False".into();
        cluster.state.apply_node(not_ready);
        let gauges = gauges(&cluster);
        assert_eq!(
            lines(&gauges.allowed),
            [
                "p, Drifted: 0",
                "p, Empty: 2",
                "p, Underutilized: 2",
                "unbounded, Drifted: 2147483647",
                "unbounded, Empty: 2147483647",
                "unbounded, Underutilized: 2147483647",
            ]
        );
        let consuming: Vec<String> =
            lines(&gauges.consuming).into_iter().filter(|line| line.starts_with("p,")).collect();
        assert_eq!(consuming, ["p, Drifted: 1", "p, Empty: 1", "p, Underutilized: 1"]);
    }

    #[test]
    fn quiet_empty_and_drifted_nodes_are_eligible_unless_they_are_protected() {
        let mut cluster = SmallCluster::new(&[("p", json!({}))]);
        for name in ["busy", "empty", "drifted", "protected"] {
            cluster.add_node(name, "p", "small/spot");
            let quiet: &[&str] = if name == "busy" { &[] } else { &[CONSOLIDATABLE] };
            with_conditions(&mut cluster, name, quiet);
        }
        with_conditions(&mut cluster, "drifted", &[DRIFTED]);
        cluster.add_pod("a", Some("drifted"), "1", &json!({}));
        cluster.add_pod("b", Some("busy"), "1", &json!({}));
        let protection = json!({"metadata": {"annotations": {(DO_NOT_DISRUPT): "true"}}});
        cluster.add_pod("c", Some("protected"), "1", &protection);
        assert_eq!(lines(&gauges(&cluster).eligible), ["drifted: 1", "empty: 1", "underutilized: 2"]);
    }

    #[test]
    fn utilization_counts_every_node_and_the_pods_that_run_there() {
        let mut cluster = SmallCluster::new(&[("p", json!({}))]);
        cluster.add_node("n1", "p", "small/spot");
        cluster.add_node_of_others("n2", "large");
        cluster.add_pod("a", Some("n1"), "1", &json!({}));
        cluster.add_pod("b", Some("n2"), "1500m", &json!({}));
        cluster.add_pod("done", Some("n2"), "1", &json!({"status": {"phase": "Succeeded"}}));
        cluster.add_pod("waiting", None, "1", &json!({}));
        cluster.add_pod("lost", Some("gone"), "1", &json!({}));
        // 2.5 of 10 CPUs, and 2 of 220 pods.
        let found = gauges(&cluster).utilization;
        assert_eq!((found[&["cpu".into()]], found[&["memory".into()]]), (25.0, 0.0));
        assert!((found[&["pods".into()]] - 2.0 / 2.2).abs() < 1e-9);
        assert_eq!(gauges(&SmallCluster::new(&[])).utilization, Series::default(), "no nodes");
    }
}
