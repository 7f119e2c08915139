//! Nodes whose pods fit elsewhere, or on cheaper nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;

use crate::controllers::context::Context;
use crate::controllers::disruption::run::{UNDERUTILIZED, candidates, initialized_ms, occupied, rules};
use crate::controllers::disruption::simulate::{Outcome, imagine};
use crate::decisions::disruption::emptiness::{Candidate, Rule};
use crate::model::units::MicroUsd;
use crate::state::snapshot;
use crate::state::snapshot::{ReadyPool, Types, is_leaving};
use crate::state::{PodRecord, Scheduling, now_ms};

/// At most so many nodes are tried in one pass.
const TRIES: usize = 20;
/// A node is taken away only where that saves at least one part in so many of its price.
const WORTH: i64 = 10;
/// Pods that came up no longer ago than this may still find a place, milliseconds.
const FRESH_MS: i64 = 30_000;

/// Nodes to take away together: each one's pods fit on the others, or on new nodes that cost less than what goes. They are
/// tried one after the other, the one that costs most for each pod that has to move first, each beside those taken so far.
pub async fn consolidate(ctx: &Arc<Context>, pools: &[ReadyPool], types: &Types) -> Vec<String> {
    let now = now_ms();
    let (order, mut rules) = {
        let state = ctx.cluster.read();
        // Not while pods move or wait for a place: the next look sees where everything landed.
        let moving = state.claims.values().any(|claim| {
            let going = claim.metadata.deletion_timestamp.is_some();
            let coming = initialized_ms(claim).is_none()
                && now - crate::state::created_ms(&claim.metadata) < snapshot::BOOT_PATIENCE_MS;
            (coming && !going)
                || is_leaving(claim)
                    && !going
                    && state.node_of(claim).is_some_and(|node| occupied(&state, &node.name_any()))
        });
        // A pod that nothing was bought for in all this time is not going to move.
        let fresh = |pod: &PodRecord| match pod.scheduling {
            Scheduling::Untried => now - state.last_pod_created_ms < FRESH_MS,
            Scheduling::Unschedulable { .. } => pod.first_unschedulable_ms.is_some_and(|at| now - at < FRESH_MS),
            _ => false,
        };
        let waiting = state.unbound.iter().filter_map(|key| state.pods.get(key)).any(|pod| !pod.daemon && fresh(pod));
        if moving || waiting {
            return Vec::new();
        }
        let holds = state.holds(now);
        let rules = rules(&state, UNDERUTILIZED, now);
        let pool_of = |candidate: &Candidate| state.pools.get(&candidate.pool);
        let may_go = |candidate: &Candidate| {
            rules.get(&candidate.pool).zip(pool_of(candidate)).is_some_and(|(rule, pool)| {
                let expected = holds.by_claim.contains_key(&candidate.claim);
                eligible(candidate, rule, &pool.spec.disruption.consolidation_policy, expected, now)
            })
        };
        let mut order = candidates(&state, &holds, types);
        order.retain(may_go);
        (worth_order(order), rules)
    };
    let mut taken_away = BTreeSet::new();
    let mut saved = 0;
    for candidate in order.into_iter().take(TRIES) {
        let Some(rule) = rules.get_mut(&candidate.pool).filter(|rule| rule.allowed > 0) else { continue };
        let mut without = taken_away.clone();
        without.insert(candidate.claim.clone());
        let worth = imagine(ctx, pools, types, &without, now).await.and_then(|outcome| worth(&outcome));
        // Moving pods has its price, too: a node must save a fair part of what it costs.
        if let Some(worth) = worth.filter(|worth| *worth - saved >= candidate.price / WORTH) {
            saved = worth;
            rule.allowed -= 1;
            taken_away.insert(candidate.claim);
        }
    }
    if !taken_away.is_empty() {
        let usd_per_hour = MicroUsd(saved).usd();
        tracing::info!(nodes = taken_away.len(), usd_per_hour, "consolidation saves");
    }
    taken_away.into_iter().collect()
}

/// Whether a node may be tried: its pool lets nodes with pods go, nothing moved on it for long enough, nothing protects it, and
/// no pod is `expected` on it.
fn eligible(candidate: &Candidate, rule: &Rule, policy: &str, expected: bool, now_ms: i64) -> bool {
    let quiet = rule.consolidate_after_ms.is_some_and(|after| candidate.quiet_since_ms + after <= now_ms);
    quiet && policy != "WhenEmpty" && candidate.pods > 0 && !candidate.protected && !expected
}

/// What taking nodes away would save, where it may be done.
fn worth(outcome: &Outcome) -> Option<i64> {
    // Spot for spot would trade a node that runs for one that may be taken back sooner.
    (outcome.whole && (outcome.new_nodes == 0 || !outcome.any_spot)).then_some(outcome.saves)
}

/// The one that costs most for each pod that has to move first.
fn worth_order(mut candidates: Vec<Candidate>) -> Vec<Candidate> {
    candidates.sort_by(|a, b| {
        let price = |candidate: &Candidate| i128::from(candidate.price);
        let pods = |candidate: &Candidate| i128::try_from(candidate.pods).unwrap_or(i128::MAX);
        (price(b) * pods(a)).cmp(&(price(a) * pods(b))).then_with(|| a.claim.cmp(&b.claim))
    });
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spot_node_is_given_up_for_room_that_is_there_and_not_for_a_new_node() {
        let outcome = |whole, new_nodes, any_spot| Outcome { whole, new_nodes, any_spot, saves: 5 };
        assert_eq!(worth(&outcome(true, 1, false)), Some(5));
        assert_eq!(worth(&outcome(true, 0, true)), Some(5));
        assert_eq!(worth(&outcome(true, 1, true)), None);
        assert_eq!(worth(&outcome(false, 0, false)), None, "a pod would be left over");
    }

    #[test]
    fn b42_a_nominated_node_is_not_consolidated() {
        let candidate = |pods, quiet_since_ms, protected| Candidate {
            claim: "c".into(),
            pool: "p".into(),
            pods,
            quiet_since_ms,
            protected,
            price: 1,
        };
        let rule = |after| Rule { consolidate_after_ms: after, allowed: 1 };
        let policy = "WhenEmptyOrUnderutilized";
        for (case, candidate, rule, policy, expected, want) in [
            ("its pods may move", candidate(2, 0, false), rule(Some(10)), policy, false, true),
            ("a pod is on its way to it", candidate(2, 0, false), rule(Some(10)), policy, true, false),
            ("it is empty", candidate(0, 0, false), rule(Some(10)), policy, false, false),
            ("a pod came lately", candidate(2, 91, false), rule(Some(10)), policy, false, false),
            ("it is protected", candidate(2, 0, true), rule(Some(10)), policy, false, false),
            ("never", candidate(2, 0, false), rule(None), policy, false, false),
            ("only when empty", candidate(2, 0, false), rule(Some(10)), "WhenEmpty", false, false),
        ] {
            assert_eq!(eligible(&candidate, &rule, policy, expected, 100), want, "{case}");
        }
    }

    #[test]
    fn the_dearest_for_each_pod_is_tried_first() {
        let candidate = |claim: &str, price, pods| Candidate {
            claim: claim.into(),
            pool: "p".into(),
            pods,
            quiet_since_ms: 0,
            protected: false,
            price,
        };
        let order = worth_order(vec![candidate("full", 100, 10), candidate("light", 50, 1), candidate("same", 10, 1)]);
        assert_eq!(order.iter().map(|candidate| &*candidate.claim).collect::<Vec<_>>(), ["light", "full", "same"]);
    }
}
