//! Node repair: which unhealthy nodes are replaced (Karpenter core reference 6.1, AWS reference 11).
//!
//! A node whose condition has been unhealthy for the time that is tolerated is removed without a drain. Where many nodes are unhealthy at once the cause is
//! probably not in the nodes: none is removed then.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::time::UnixMillis;

use crate::decisions::termination::deadlines::termination_deadline;
use crate::state::node_health::Unhealthy;
use crate::state::object_ext::ObjectExt;
use crate::state::tables::ClusterState;

/// The share of the nodes of a NodePool that may be unhealthy, in percent, rounded up to whole nodes.
const MAX_UNHEALTHY: usize = 20;
/// From this number of unhealthy nodes on, at most half of all nodes may be unhealthy.
const MANY: usize = 5;

/// A node to repair.
#[derive(Clone, Debug, PartialEq)]
pub struct Repair {
    pub claim: Arc<NodeClaim>,
    /// Type of the unhealthy condition.
    pub condition: &'static str,
    pub since: UnixMillis,
    /// Whether the time of its termination has to be set to now.
    pub expire: bool,
}

/// The unhealthy nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Repairs {
    pub due: Vec<Repair>,
    /// Nodes that would be due, and why they are left alone.
    pub blocked: Vec<(Arc<NodeClaim>, String)>,
    /// When the next node is due.
    pub next: Option<UnixMillis>,
}

/// Nodes, and those of them that are unhealthy.
#[derive(Clone, Copy, Debug, Default)]
struct Health {
    nodes: usize,
    unhealthy: usize,
}

impl Health {
    fn add(&mut self, is_unhealthy: bool) {
        self.nodes += 1;
        self.unhealthy += usize::from(is_unhealthy);
    }

    fn exceeds_share(self) -> bool {
        self.unhealthy > (self.nodes * MAX_UNHEALTHY).div_ceil(100)
    }
}

/// The nodes to repair now. A node counts as unhealthy from the start, and until it is gone.
pub fn repairs(state: &ClusterState, now: UnixMillis) -> Repairs {
    let mut out = Repairs::default();
    let ours = state.unhealthy.iter().filter_map(|(name, unhealthy)| {
        let node = state.nodes.get(name)?;
        Some((node, state.claim_of(node)?, unhealthy))
    });
    let (due, later): (Vec<_>, Vec<_>) = ours.partition(|(_, _, unhealthy)| unhealthy.until <= now);
    out.next = later.iter().map(|(_, _, unhealthy)| unhealthy.until).min();
    if due.is_empty() {
        return out;
    }
    let (all, pools) = health(state);
    for (node, claim, unhealthy) in due {
        let expire = termination_deadline(claim).is_none_or(|deadline| deadline > now);
        if !expire && claim.is_deleting() {
            continue;
        }
        let blocker = if is_vetoed(node.annotations()) || is_vetoed(claim.annotations()) {
            Some(format!("its annotation {} forbids it", labels::DO_NOT_REPAIR))
        } else if all.unhealthy >= MANY && all.unhealthy * 2 > all.nodes {
            Some(format!("{} of all {} nodes are unhealthy, more than half", all.unhealthy, all.nodes))
        } else {
            match claim.node_pool() {
                Some(pool) => exceeded(pools.get(pool).copied().unwrap_or_default(), "of its NodePool"),
                None => exceeded(all, "of the cluster"),
            }
        };
        let claim = Arc::clone(claim);
        let Unhealthy { condition, since, .. } = *unhealthy;
        match blocker {
            Some(why) => out.blocked.push((claim, why)),
            None => out.due.push(Repair { claim, condition, since, expire }),
        }
    }
    out
}

/// The health of all nodes with a NodeClaim, and by NodePool.
fn health(state: &ClusterState) -> (Health, HashMap<&str, Health>) {
    let (mut all, mut pools) = (Health::default(), HashMap::<&str, Health>::new());
    for (name, node) in &state.nodes {
        let Some(claim) = state.claim_of(node) else { continue };
        let is_unhealthy = state.unhealthy.contains_key(name);
        all.add(is_unhealthy);
        if let Some(pool) = claim.node_pool() {
            pools.entry(pool).or_default().add(is_unhealthy);
        }
    }
    (all, pools)
}

fn is_vetoed(annotations: &BTreeMap<String, String>) -> bool {
    annotations.get(labels::DO_NOT_REPAIR).is_some_and(|value| labels::forbids_disruption(value))
}

fn exceeded(health: Health, of: &str) -> Option<String> {
    let Health { nodes, unhealthy } = health;
    health
        .exceeds_share()
        .then(|| format!("{unhealthy} of the {nodes} nodes {of} are unhealthy, more than {MAX_UNHEALTHY} %"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;

    const NOW: UnixMillis = UnixMillis(1_800_000_000_000);
    const MINUTE: Duration = Duration::from_mins(1);

    fn condition(kind: &str, status: &str, minutes: u32) -> Value {
        json!({"type": kind, "status": status, "lastTransitionTime": (NOW - MINUTE * minutes).rfc3339()})
    }

    /// A node of a NodePool with these conditions.
    fn put(state: &mut ClusterState, name: &str, pool: Option<&str>, claim: &Value, conditions: &Value) {
        let mut patch = json!({"metadata": {"labels": {(labels::NODE_POOL): pool}}, "status": objects::launched(name, &["Registered"])});
        json_patch::merge(&mut patch, claim);
        state.apply_claim(objects::claim(name, &patch));
        let spec = json!({"providerID": format!("aws:///z/{name}")});
        state.apply_node(objects::node(name, &json!({"spec": spec, "status": {"conditions": conditions}})));
    }

    fn due(state: &ClusterState) -> Vec<String> {
        repairs(state, NOW).due.iter().map(|repair| repair.claim.name_any()).collect()
    }

    #[test]
    fn a_node_is_repaired_after_the_time_that_its_condition_is_tolerated() {
        for (minutes, repaired, next) in [(0, false, Some(30)), (29, false, Some(1)), (30, true, None)] {
            let mut state = ClusterState::default();
            put(&mut state, "a", Some("p"), &json!({}), &json!([condition("Ready", "False", minutes)]));
            put(&mut state, "b", Some("p"), &json!({}), &json!([condition("Ready", "True", 99)]));
            let found = repairs(&state, NOW);
            let due = found.due.first().map(|repair| (repair.condition, repair.since));
            assert_eq!(due, repaired.then(|| ("Ready", NOW - MINUTE * minutes)), "{minutes} minutes");
            assert_eq!(found.next, next.map(|minutes| NOW + MINUTE * minutes), "{minutes} minutes");
        }
    }

    #[test]
    fn at_most_a_fifth_of_a_node_pool_is_repaired_and_one_node_at_least() {
        for (nodes, unhealthy, repaired) in
            [(1, 1, 1), (2, 1, 1), (2, 2, 0), (5, 1, 1), (5, 2, 0), (6, 2, 2), (10, 2, 2), (10, 3, 0), (11, 3, 3)]
        {
            for pool in [Some("p"), None] {
                let mut state = ClusterState::default();
                for n in 0..nodes {
                    let conditions = json!([condition("Ready", if n < unhealthy { "False" } else { "True" }, 31)]);
                    put(&mut state, &format!("a{n:02}"), pool, &json!({}), &conditions);
                }
                // Nodes of others do not count.
                let conditions = json!([condition("Ready", "False", 99)]);
                state.apply_node(objects::node("other", &json!({"status": {"conditions": conditions}})));
                let found = repairs(&state, NOW);
                assert_eq!(found.due.len(), repaired, "{unhealthy} of {nodes} in {pool:?}");
                assert_eq!(found.blocked.len(), unhealthy - repaired, "{unhealthy} of {nodes} in {pool:?}");
            }
        }
    }

    #[test]
    fn no_node_is_repaired_when_most_of_the_cluster_is_unhealthy() {
        for (nodes, unhealthy, repaired) in [(4, 4, 4), (8, 4, 4), (10, 5, 5), (9, 5, 0), (5, 5, 0)] {
            let mut state = ClusterState::default();
            for n in 0..nodes {
                let conditions = json!([condition("Ready", if n < unhealthy { "Unknown" } else { "True" }, 31)]);
                let pool = format!("pool-{n}");
                put(&mut state, &format!("a{n:02}"), Some(&pool), &json!({}), &conditions);
            }
            assert_eq!(due(&state).len(), repaired, "{unhealthy} of {nodes}, each in a NodePool of its own");
        }
    }

    #[test]
    fn a_node_that_is_being_deleted_is_expelled_and_a_vetoed_one_stays() {
        let unhealthy = json!([condition("Ready", "False", 31)]);
        let deleting = |annotations: Value| json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"], "annotations": annotations}});
        let at = |at: UnixMillis| json!({(labels::TERMINATION_TIMESTAMP): at.rfc3339()});
        let protected = json!({(labels::DO_NOT_DISRUPT): "true"});
        for (case, claim, expected) in [
            ("running", json!({}), Some(true)),
            ("protected from disruption", json!({"metadata": {"annotations": protected}}), Some(true)),
            ("draining without a deadline", deleting(json!({})), Some(true)),
            ("draining until tomorrow", deleting(at(NOW + Duration::from_hours(24))), Some(true)),
            ("draining, the time is over", deleting(at(NOW - MINUTE)), None),
            ("annotated before a crash", json!({"metadata": {"annotations": at(NOW - MINUTE)}}), Some(false)),
            ("vetoed", json!({"metadata": {"annotations": {(labels::DO_NOT_REPAIR): "true"}}}), None),
            ("not vetoed", json!({"metadata": {"annotations": {(labels::DO_NOT_REPAIR): "false"}}}), Some(true)),
        ] {
            let mut state = ClusterState::default();
            put(&mut state, "a", Some("p"), &claim, &unhealthy);
            let found = repairs(&state, NOW);
            assert_eq!(found.due.first().map(|repair| repair.expire), expected, "{case}");
            assert_eq!(found.blocked.len(), usize::from(case == "vetoed"), "{case}");
        }
    }
}
