//! Whether the nodes of a NodePool register: the condition NodeRegistrationHealthy (Karpenter core reference 5.6). It informs only.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kube::ResourceExt;
use stowage_api::conditions::{NODE_REGISTRATION_HEALTHY, Status, get};
use stowage_api::{NodeClaim, NodePool, conditions};

use crate::state::object_ext::NodeClaimExt;

/// Number of results that count, the newest ones.
const RESULTS: usize = 4;
/// Failures among them that make a NodePool unhealthy.
const FAILURES: usize = 2;

/// What the results belong to: after a change of the NodePool or of its node class there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Generations {
    pool: Option<i64>,
    class: Option<i64>,
}

/// The newest results of a NodePool.
#[derive(Debug, Default)]
struct Results {
    of: Generations,
    newest: VecDeque<bool>,
    /// Reason and message of the last failure.
    failure: (String, String),
}

/// The newest results by UID of the NodePool. A new process starts with what the conditions say.
#[derive(Debug, Default)]
pub struct RegistrationHealth {
    pools: BTreeMap<String, Results>,
}

/// The condition of a NodePool: status, reason and message.
pub type Health = (Status, String, String);

fn unknown() -> Health {
    (Status::Unknown, "AwaitingReconciliation".into(), "object is awaiting reconciliation".into())
}

/// The generation of the node class that the condition of a NodePool is about.
fn observed(pool: &NodePool) -> Generations {
    let status = pool.status.as_ref();
    let condition = status.and_then(|status| get(&status.conditions, NODE_REGISTRATION_HEALTHY));
    Generations {
        pool: condition.and_then(|condition| condition.observed_generation),
        class: status.and_then(|status| status.node_class_observed_generation),
    }
}

impl RegistrationHealth {
    /// Records that a NodeClaim of this NodePool registered, or was abandoned before. Claims that the NodePool does not own do not count.
    pub fn record(&mut self, pool: &NodePool, class: Option<i64>, claim: &NodeClaim, registered: bool) {
        let uid = pool.uid().unwrap_or_default();
        if !claim.owner_references().iter().any(|owner| owner.uid == uid) {
            return;
        }
        let of = Generations { pool: pool.metadata.generation, class };
        let results = self.pools.entry(uid).or_default();
        if results.newest.is_empty() || results.of != of {
            *results = Results { of, ..Results::default() };
            if observed(pool) == of {
                let conditions = pool.status.as_ref().map(|status| &*status.conditions).unwrap_or_default();
                let known = get(conditions, NODE_REGISTRATION_HEALTHY);
                match known.map(|condition| &*condition.status) {
                    Some("True") => results.newest.push_back(true),
                    Some("False") => results.newest.extend([false; FAILURES]),
                    _ => {}
                }
            }
        }
        if !registered {
            let launched = claim.condition(conditions::LAUNCHED).filter(|condition| condition.status != "True");
            let text = |reason: &str, message: &str| (reason.to_owned(), message.to_owned());
            results.failure = launched.map_or_else(
                || text("RegistrationFailed", "Failed to register node"),
                |condition| text(&condition.reason, &condition.message),
            );
        }
        results.newest.push_back(registered);
        if results.newest.len() > RESULTS {
            results.newest.pop_front();
        }
    }

    /// The condition that a NodePool should have, given the generation of its node class.
    pub fn of(&self, pool: &NodePool, class: Option<i64>) -> Health {
        let of = Generations { pool: pool.metadata.generation, class };
        let results = pool.uid().and_then(|uid| self.pools.get(&uid)).filter(|results| results.of == of);
        let Some(results) = results.filter(|results| !results.newest.is_empty()) else {
            let conditions = pool.status.as_ref().map(|status| &*status.conditions).unwrap_or_default();
            let known = get(conditions, NODE_REGISTRATION_HEALTHY).filter(|_| observed(pool) == of);
            let Some(known) = known else { return unknown() };
            let status = match &*known.status {
                "True" => Status::True,
                "False" => Status::False,
                _ => return unknown(),
            };
            return (status, known.reason.clone(), known.message.clone());
        };
        if results.newest.iter().filter(|registered| !**registered).count() < FAILURES {
            return (Status::True, NODE_REGISTRATION_HEALTHY.into(), String::new());
        }
        let (reason, message) = results.failure.clone();
        (Status::False, reason, message)
    }

    /// Forgets NodePools that are gone.
    pub fn retain<'a>(&mut self, pools: impl Iterator<Item = &'a NodePool>) {
        let uids: BTreeSet<String> = pools.filter_map(ResourceExt::uid).collect();
        self.pools.retain(|uid, _| uids.contains(uid));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;

    fn pool(generation: i64, status: Option<(&str, i64)>) -> NodePool {
        let status = status.map(|(status, class)| {
            let condition = json!({"type": NODE_REGISTRATION_HEALTHY, "status": status, "reason": "Known", "message": "",
                "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z"});
            json!({"conditions": [condition], "nodeClassObservedGeneration": class})
        });
        objects::node_pool("p", &json!({"metadata": {"generation": generation}, "status": status}))
    }

    fn claim(launched: &str, owner: &str) -> NodeClaim {
        let owner = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "name": "p", "uid": owner});
        let condition: Value = json!({"type": "Launched", "status": launched, "reason": "LaunchFailed", "message": "no", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        objects::claim("c", &json!({"metadata": {"ownerReferences": [owner]}, "status": {"conditions": [condition]}}))
    }

    #[test]
    fn b57_two_failures_of_four_make_a_node_pool_unhealthy() {
        let (pool, claim) = (pool(1, None), claim("True", "uid-p"));
        let mut health = RegistrationHealth::default();
        assert_eq!(health.of(&pool, Some(1)).0, Status::Unknown);
        for (registered, expected) in [
            (false, Status::True),
            (false, Status::False),
            (true, Status::False),
            (true, Status::False),
            (true, Status::True),
            (false, Status::True),
            (true, Status::True),
            (false, Status::False),
        ] {
            health.record(&pool, Some(1), &claim, registered);
            assert_eq!(health.of(&pool, Some(1)).0, expected);
        }
        assert_eq!(health.of(&pool, Some(1)).1, "RegistrationFailed");
        assert_eq!(health.of(&pool, Some(2)).0, Status::Unknown, "another generation of the node class");
        health.retain([].into_iter());
        assert_eq!(health.of(&pool, Some(1)).0, Status::Unknown);
    }

    #[test]
    fn b57_a_failed_launch_gives_its_reason_and_claims_of_others_do_not_count() {
        let pool = pool(1, None);
        let mut health = RegistrationHealth::default();
        for _ in 0..2 {
            health.record(&pool, None, &claim("Unknown", "uid-other"), false);
        }
        assert_eq!(health.of(&pool, None).0, Status::Unknown);
        for _ in 0..2 {
            health.record(&pool, None, &claim("Unknown", "uid-p"), false);
        }
        assert_eq!(health.of(&pool, None), (Status::False, "LaunchFailed".into(), "no".into()));
    }

    #[test]
    fn b57_a_new_process_starts_with_the_condition_and_a_change_resets_it() {
        let claim = claim("True", "uid-p");
        for (known, class, before, registered, after) in [
            ("False", 3, Status::False, true, Status::False),
            ("True", 3, Status::True, false, Status::True),
            ("False", 2, Status::Unknown, true, Status::True),
            ("Unknown", 3, Status::Unknown, false, Status::True),
        ] {
            let (pool, mut health) = (pool(7, Some((known, class))), RegistrationHealth::default());
            assert_eq!(health.of(&pool, Some(3)).0, before, "{known} of {class}");
            health.record(&pool, Some(3), &claim, registered);
            assert_eq!(health.of(&pool, Some(3)).0, after, "{known} of {class}");
        }
    }
}
