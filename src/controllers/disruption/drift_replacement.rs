//! Which drifted nodes are replaced now (core reference 4.12). As with consolidation their pods' new places come first: on nodes
//! that are up, or on new ones. Price is no matter.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::ResourceExt;

use crate::api::{NodeClaim, conditions};
use crate::controllers::context::{Context, reference};
use crate::controllers::disruption::run::{initialized_ms, pods_of, rules};
use crate::controllers::disruption::simulate::imagine;
use crate::decisions::disruption::drift_order::{Candidate, order};
use crate::model::labels;
use crate::state::holds::Holds;
use crate::state::snapshot::{ReadyPool, Types, is_leaving};
use crate::state::{ClusterState, PodRecord, now_ms};

/// Reason of a drifted node, as budgets name it.
pub const DRIFTED: &str = "Drifted";
/// At most so many nodes are tried in one pass.
const TRIES: usize = 20;
/// A node whose pods have no other place is tried again after so long, milliseconds: others get their turn.
const PUT_OFF_MS: i64 = 60_000;
/// A node whose replacement did not come up in time is tried again after so long, milliseconds.
const GIVEN_UP_MS: i64 = 600_000;

/// Drifted nodes that could not be replaced, and until when they are left alone: milliseconds since the epoch, by claim.
#[derive(Debug, Default)]
pub struct Replacement {
    put_off_until_ms: BTreeMap<String, i64>,
}

impl Replacement {
    /// Notes that a replacement did not come up in time.
    pub fn given_up(&mut self, claim: &str, now_ms: i64) {
        self.put_off_until_ms.insert(claim.to_owned(), now_ms + GIVEN_UP_MS);
    }

    /// Claims whose nodes are to be replaced now, within their pools' budgets.
    pub async fn choose(&mut self, ctx: &Arc<Context>, pools: &[ReadyPool], types: &Types) -> Vec<String> {
        let now = now_ms();
        let (candidates, mut rules) = {
            let state = ctx.cluster.read();
            (drifted(&state, &state.holds(now)), rules(&state, DRIFTED, now))
        };
        self.put_off_until_ms.retain(|_, until| *until > now);
        for candidate in &candidates {
            if let Some(obstacle) = &candidate.obstacle {
                blocked(ctx, &candidate.claim, obstacle).await;
            }
        }
        let mut taken = BTreeSet::new();
        let mut tries = 0;
        let put_off: BTreeSet<String> = self.put_off_until_ms.keys().cloned().collect();
        for candidate in order(&candidates, &put_off) {
            let Some(rule) = rules.get_mut(&candidate.pool).filter(|rule| rule.allowed > 0) else { continue };
            if candidate.pods > 0 {
                tries += 1;
                if tries > TRIES {
                    break;
                }
                let mut without = taken.clone();
                without.insert(candidate.claim.clone());
                if !imagine(ctx, pools, types, &without, now).await.is_some_and(|outcome| outcome.whole) {
                    self.put_off_until_ms.insert(candidate.claim.clone(), now + PUT_OFF_MS);
                    let why = "its pods have no place on other nodes, and none can be bought for them";
                    blocked(ctx, &candidate.claim, why).await;
                    continue;
                }
            }
            rule.allowed -= 1;
            taken.insert(candidate.claim.clone());
        }
        taken.into_iter().collect()
    }
}

async fn blocked(ctx: &Context, claim: &str, why: &str) {
    let claim = ctx.cluster.read().claims.get(claim).cloned();
    if let Some(claim) = claim {
        let note = format!("drifted, and can't be replaced now: {why}");
        ctx.event(reference(&*claim), false, "DisruptionBlocked", &note).await;
    }
}

/// Drifted nodes that are up and not about to go. One that room is held on is just being filled: it comes later.
fn drifted(state: &ClusterState, holds: &Holds) -> Vec<Candidate> {
    let all = state.claims.iter().filter_map(|(name, claim)| {
        let list = &claim.status.as_ref()?.conditions;
        let condition = conditions::get(list, conditions::DRIFTED).filter(|condition| condition.status == "True")?;
        let node = state.node_of(claim)?;
        let busy = is_leaving(claim)
            || node.metadata.deletion_timestamp.is_some()
            || initialized_ms(claim).is_none()
            || holds.by_claim.contains_key(name);
        (!busy).then(|| Candidate {
            claim: name.clone(),
            pool: claim.labels().get(labels::NODE_POOL).cloned().unwrap_or_default(),
            since_ms: condition.last_transition_time.0.as_millisecond(),
            pods: pods_of(state, holds, claim),
            obstacle: obstacle(state, claim, node),
        })
    });
    all.collect()
}

/// What protects a node. Pods don't where the claim has a time by which its drain ends (core reference 4.2).
fn obstacle(state: &ClusterState, claim: &NodeClaim, node: &k8s_openapi::api::core::v1::Node) -> Option<String> {
    let key = labels::DO_NOT_DISRUPT;
    if node.annotations().get(key).is_some_and(|value| value == "true") {
        return Some(format!("its Node has the annotation {key}"));
    }
    if claim.spec.termination_grace_period.is_some() {
        return None;
    }
    let name = node.name_any();
    let guarded: Option<&PodRecord> =
        state.pods_on(&name).filter(|pod| pod.do_not_disrupt && pod.active()).min_by_key(|pod| pod.key());
    guarded.map(|pod| format!("pod {} has the annotation {key}", pod.key()))
}

#[cfg(test)]
mod tests;
