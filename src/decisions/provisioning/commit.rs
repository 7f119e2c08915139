//! Which new nodes of a plan are purchased while pods still arrive: those with a pod that has waited long enough. The pods of the others are planned
//! again, with those that arrive until then.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;
use stowage_planner::{Plan, Problem, dependent_parts};

use crate::decisions::provisioning::batch_window::{BatchLimits, BatchWindow, is_over};

/// While pods arrive, plans follow each other after this part of the time that a pod may wait.
const PLANS_PER_WAIT: u32 = 4;
/// At most one part in so many of the time is spent on plans and their writes.
const SHARE_OF_PASSES: u32 = 2;

/// The new nodes that a plan purchases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    All,
    /// Those with a pod that has needed a node since then, and those that it depends on.
    WaitingSince(UnixMillis),
}

impl Commit {
    /// What the plan of a batch that closes now purchases: everything when no pod is about to join. Otherwise what would wait too long until the next
    /// plan. `last_pass` is what the last plan and its writes took.
    pub fn of(window: &BatchWindow, limits: BatchLimits, last_pass: Duration, now: UnixMillis) -> Self {
        let until_next = (limits.max / PLANS_PER_WAIT).max(last_pass * SHARE_OF_PASSES);
        match limits.max.checked_sub(until_next) {
            Some(wait) if !wait.is_zero() && !is_over(window, limits, now) => Self::WaitingSince(now - wait),
            _ => Self::All,
        }
    }

    /// Removes the new nodes that are not purchased yet from a plan. Returns their pods, as indexes into [`Problem::pods`]. `first_seen` is since when
    /// each pod has needed a node; a pod without a time has just arrived.
    ///
    /// Nodes whose pods others require near them (`podAffinity`) are purchased together with these; those on existing nodes don't wait.
    pub fn apply(
        self,
        problem: &Problem,
        plan: &mut Plan,
        first_seen: &BTreeMap<String, UnixMillis>,
    ) -> BTreeSet<usize> {
        let Self::WaitingSince(since) = self else { return BTreeSet::new() };
        let is_due = |pod: &usize| first_seen.get(&*problem.pods[*pod].key).is_some_and(|at| *at <= since);
        let parts = dependent_parts(problem, plan);
        let mut due: BTreeSet<usize> = BTreeSet::from([parts[plan.new_nodes.len()]]);
        due.extend(
            plan.new_nodes.iter().zip(&parts).filter(|(node, _)| node.pods.iter().any(is_due)).map(|(_, part)| *part),
        );
        let mut parts = parts.iter();
        let mut later = BTreeSet::new();
        plan.new_nodes.retain(|node| {
            let is_purchased = parts.next().is_some_and(|part| due.contains(part));
            if !is_purchased {
                later.extend(&node.pods);
            }
            is_purchased
        });
        if !later.is_empty() {
            plan.cost = MicroUsd(
                plan.new_nodes.iter().filter_map(|node| node.choices.first()).map(|choice| choice.price.0).sum(),
            );
            (plan.lower_bound, plan.optimal, plan.proof) = (None, false, None);
        }
        later
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_planner::PlanSettings;

    use super::*;
    use crate::decisions::demand::demand;
    use crate::state::plan_record::Holds;
    use crate::state::snapshot::{Snapshot, SnapshotRequest, take};
    use crate::state::snapshot_cache::SnapshotCache;
    use crate::test_support::small_cluster::{self, SmallCluster};

    const NOW: UnixMillis = UnixMillis(10_000);

    fn commit(latest: i64, max: u64, last_pass: u64) -> Commit {
        let window = BatchWindow { opened: UnixMillis(9_000), latest: UnixMillis(latest), unattempted: 5 };
        let limits = BatchLimits { idle: Duration::from_secs(1), max: Duration::from_millis(max) };
        Commit::of(&window, limits, Duration::from_millis(last_pass), NOW)
    }

    #[test]
    fn an_open_batch_purchases_what_would_wait_too_long_until_the_next_plan() {
        for (case, latest, max, last_pass, expected) in [
            ("a quarter of the wait until the next plan", 9_990, 1_000, 0, Commit::WaitingSince(UnixMillis(9_250))),
            ("twice the last pass", 9_990, 1_000, 200, Commit::WaitingSince(UnixMillis(9_400))),
            ("no time is left for another plan", 9_990, 1_000, 500, Commit::All),
            ("passes last longer than pods may wait", 9_990, 1_000, 5_000, Commit::All),
            ("no pod has joined for a second", 9_000, 1_000, 0, Commit::All),
            ("as long as Karpenter's default", 9_990, 10_000, 0, Commit::WaitingSince(UnixMillis(2_500))),
        ] {
            assert_eq!(commit(latest, max, last_pass), expected, "{case}");
        }
    }

    /// A cluster with rejected pods of these CPU requests and patches. 7 CPUs fill a node.
    fn cluster(pods: &[(&str, &str, Value)]) -> SmallCluster {
        let mut cluster = SmallCluster::new(&[("default", json!({}))]);
        for (name, cpu, spec) in pods {
            cluster.add_pod(name, None, cpu, &json!({"metadata": {"labels": {"app": name}}, "spec": spec}));
        }
        cluster
    }

    fn near(app: &str) -> Value {
        let term = json!({"topologyKey": labels::ZONE, "labelSelector": {"matchLabels": {"app": app}}});
        json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}})
    }

    fn planned(cluster: &SmallCluster) -> (Snapshot, Plan) {
        let (settings, holds) = (PlanSettings::default(), Holds::default());
        let request = SnapshotRequest { pools: &cluster.pools, settings: &settings, now: small_cluster::NOW };
        let pods = demand(&cluster.state, &holds, small_cluster::NOW);
        let snapshot = take(&cluster.state, &holds, pods, &mut SnapshotCache::default(), request);
        let plan = stowage_planner::plan(&snapshot.problem, &snapshot.column_cache);
        (snapshot, plan)
    }

    /// The pods of the nodes that are purchased, the pods that are planned again, and the cost. Of `new`, no time is known.
    fn purchased(cluster: &SmallCluster, due: &[&str]) -> (Vec<String>, Vec<String>, i64) {
        let (Snapshot { problem, .. }, mut plan) = planned(cluster);
        let first_seen = |pod: &str| (format!("n/{pod}"), UnixMillis(if due.contains(&pod) { 9_000 } else { 9_001 }));
        let first_seen = ["a", "b", "c", "d"].into_iter().map(first_seen).collect();
        let later = Commit::WaitingSince(UnixMillis(9_000)).apply(&problem, &mut plan, &first_seen);
        let name = |pod: &usize| problem.pods[*pod].key.trim_start_matches("n/").to_owned();
        let mut nodes: Vec<String> =
            plan.new_nodes.iter().map(|node| node.pods.iter().map(name).collect::<Vec<_>>().join("+")).collect();
        nodes.sort();
        (nodes, later.iter().map(name).collect(), plan.cost.0)
    }

    #[test]
    fn a_node_is_purchased_if_one_of_its_pods_is_due() {
        let alone = || json!({});
        let cluster = cluster(&[("a", "6", alone()), ("b", "7", alone()), ("c", "1", alone()), ("new", "7", alone())]);
        let (nodes, later, cost) = purchased(&cluster, &["a"]);
        assert_eq!((nodes.concat().contains('a'), nodes.len(), cost), (true, 1, 160_000));
        assert!(later.contains(&"b".to_owned()) && later.contains(&"new".to_owned()), "{later:?}");
        let (nodes, later, cost) = purchased(&cluster, &[]);
        assert_eq!((nodes.len(), later.len(), cost), (0, 4, 0));
        let (snapshot, mut plan) = planned(&cluster);
        let whole = plan.clone();
        assert!(Commit::All.apply(&snapshot.problem, &mut plan, &BTreeMap::new()).is_empty());
        assert_eq!(plan, whole);
    }

    #[test]
    fn nothing_is_proven_of_a_part_of_a_plan() {
        let names: Vec<(String, String)> =
            (0..12).map(|at| (format!("p{at}"), format!("{}m", 300 + at * 37 % 53 * 100))).collect();
        let pods: Vec<_> = names.iter().map(|(name, cpu)| (name.as_str(), cpu.as_str(), json!({}))).collect();
        let cluster = cluster(&pods);
        let (snapshot, mut plan) = planned(&cluster);
        assert!(plan.proof.is_some());
        Commit::WaitingSince(UnixMillis(0)).apply(&snapshot.problem, &mut plan, &BTreeMap::new());
        plan.prove();
        assert_eq!((plan.lower_bound, plan.optimal), (None, false));
    }

    #[test]
    fn nodes_whose_pods_are_required_near_a_due_pod_are_purchased_with_it() {
        let cluster =
            cluster(&[("a", "7", near("b")), ("b", "7", json!({})), ("c", "7", near("c")), ("d", "7", json!({}))]);
        assert_eq!(purchased(&cluster, &["a"]).0, ["a", "b"]);
        assert_eq!(purchased(&cluster, &["b"]).0, ["a", "b"]);
        assert_eq!(purchased(&cluster, &["c"]).0, ["c"]);
    }

    #[test]
    fn the_company_of_a_pod_on_an_existing_node_does_not_wait() {
        let mut cluster = cluster(&[("a", "1500m", near("b")), ("b", "7", json!({})), ("d", "7", json!({}))]);
        cluster.add_node("n", "default", "small/on-demand");
        let (_, plan) = planned(&cluster);
        assert_eq!((plan.placements.len(), plan.new_nodes.len()), (1, 2));
        assert_eq!(purchased(&cluster, &[]).0, ["b"]);
    }
}
