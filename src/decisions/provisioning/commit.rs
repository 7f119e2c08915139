//! Which new nodes of a plan are purchased while pods still arrive: those with a pod that has waited long enough. The pods of the others are planned
//! again, with those that arrive until then.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::decisions::provisioning::batch_window::{BatchLimits, BatchWindow, is_over};
use crate::model::time::UnixMillis;
use crate::model::units::MicroUsd;
use crate::planner::input::problem::Problem;
use crate::planner::output::dependencies::dependent_parts;
use crate::planner::output::plan::Plan;

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

    use super::*;
    use crate::test_support::planner::{World, ZONE, affinity, spread};

    const NOW: UnixMillis = UnixMillis(10_000);

    fn commit(latest: i64, max: u64, last_pass: u64) -> Commit {
        let window = BatchWindow { opened: UnixMillis(9_000), latest: UnixMillis(latest), unattempted: 5 };
        let limits = BatchLimits { idle: Duration::from_secs(1), max: Duration::from_millis(max) };
        Commit::of(&window, limits, Duration::from_millis(last_pass), NOW)
    }

    #[test]
    fn a_batch_that_pods_still_join_purchases_what_would_wait_too_long_until_the_next_plan() {
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

    /// Each pod fills a node: nodes that are purchased, pods that are planned again, and the cost.
    fn purchased(world: &World, due: &[&str]) -> (Vec<String>, Vec<String>, i64) {
        let mut plan = world.plan();
        let first_seen =
            |pod: &str| (format!("default/{pod}"), UnixMillis(if due.contains(&pod) { 9_000 } else { 9_001 }));
        let names = ["a-0", "b-0", "c-0", "d-0"];
        let first_seen = names.into_iter().map(first_seen).collect();
        let later = Commit::WaitingSince(UnixMillis(9_000)).apply(&world.problem, &mut plan, &first_seen);
        let key = |pod: &usize| world.problem.pods[*pod].key.trim_start_matches("default/").to_owned();
        let mut nodes: Vec<String> =
            plan.new_nodes.iter().map(|node| node.pods.iter().map(key).collect::<Vec<_>>().join("+")).collect();
        nodes.sort();
        (nodes, later.iter().map(key).collect(), plan.cost.0)
    }

    fn world(pods: &[(&str, &str, Value)]) -> World {
        let mut world = World::new();
        for (name, cpu, spec) in pods {
            world.pods(name, 1, &json!({"app": name}), cpu, "1Gi", spec);
        }
        world
    }

    #[test]
    fn a_node_is_purchased_if_one_of_its_pods_is_due_and_the_pods_of_the_others_are_planned_again() {
        let alone = || json!({});
        let mut world = world(&[("a", "15", alone()), ("b", "15", alone()), ("c", "1", alone())]);
        // It has just arrived, and no time is known of it.
        world.pods("new", 1, &json!({}), "15", "1Gi", &json!({}));
        let (nodes, later, cost) = purchased(&world, &["a-0"]);
        assert_eq!((nodes.concat().contains("a-0"), nodes.len(), cost), (true, 1, 640_000));
        assert!(later.contains(&"b-0".to_owned()) && later.contains(&"new-0".to_owned()), "{later:?}");
        let (nodes, later, cost) = purchased(&world, &[]);
        assert_eq!((nodes.len(), later.len(), cost), (0, 4, 0));
        let mut plan = world.plan();
        let whole = plan.clone();
        assert!(Commit::All.apply(&world.problem, &mut plan, &BTreeMap::new()).is_empty());
        assert_eq!(plan, whole);
    }

    #[test]
    fn nothing_is_proven_of_a_part_of_a_plan() {
        let mut world = World::new();
        let labels = json!({"app": "p"});
        world.pods("p", 6, &labels, "3", "2Gi", &spread(ZONE, &labels, &json!({})));
        let mut plan = crate::planner::plan(&world.problem, &world.column_cache);
        assert!(plan.proof.is_some());
        Commit::WaitingSince(UnixMillis(0)).apply(&world.problem, &mut plan, &BTreeMap::new());
        plan.prove();
        assert_eq!((plan.lower_bound, plan.optimal), (None, false));
    }

    #[test]
    fn nodes_whose_pods_are_required_near_a_due_pod_are_purchased_with_it() {
        let near = |app: &str| affinity("podAffinity", ZONE, &json!({"app": app}));
        let pods = [("a", "15", near("b")), ("b", "15", json!({})), ("c", "15", near("c")), ("d", "15", json!({}))];
        let world = world(&pods);
        assert_eq!(purchased(&world, &["a-0"]).0, ["a-0", "b-0"]);
        assert_eq!(purchased(&world, &["b-0"]).0, ["a-0", "b-0"]);
        assert_eq!(purchased(&world, &["c-0"]).0, ["c-0"]);
    }

    #[test]
    fn the_company_of_a_pod_on_an_existing_node_does_not_wait() {
        let mut world = world(&[
            ("a", "3", affinity("podAffinity", ZONE, &json!({"app": "b"}))),
            ("b", "15", json!({"nodeSelector": {ZONE: "z-a"}})),
            ("d", "15", json!({})),
        ]);
        world.node("n", "z-a", 4, &[]);
        let plan = world.plan();
        assert_eq!((plan.placements.len(), plan.new_nodes.len()), (1, 2));
        assert_eq!(purchased(&world, &[]).0, ["b-0"]);
    }
}
