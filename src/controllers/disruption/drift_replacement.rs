//! Chooses the drifted nodes to replace (Karpenter core reference 4.12). Their pods need other nodes first, as in consolidation;
//! the price does not matter.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::clock;
use crate::controllers::context::{Context, EventSpec};
use crate::controllers::disruption::simulate::simulate;
use crate::decisions::disruption::candidates::allowances;
use crate::decisions::disruption::drift_order::{drifted, order};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::model::time::UnixMillis;
use crate::state::instance_types::{InstanceTypes, ReadyPool};

/// Maximum number of nodes that one pass simulates.
const MAX_CANDIDATES: usize = 20;
/// Backoff of a node whose pods have no other node.
const BLOCKED_BACKOFF: Duration = Duration::from_mins(1);
/// Backoff of a node whose replacement was not ready in time.
const ABANDONED_BACKOFF: Duration = Duration::from_mins(10);

/// Drifted nodes that could not be replaced, by claim, with the end of their backoff.
#[derive(Debug, Default)]
pub struct DriftReplacement {
    backoff_until: BTreeMap<String, UnixMillis>,
}

impl DriftReplacement {
    /// Records that the replacement of a node was not ready in time.
    pub fn abandoned(&mut self, claim: &str, now: UnixMillis) {
        self.backoff_until.insert(claim.to_owned(), now + ABANDONED_BACKOFF);
    }

    /// Claims whose nodes are to be replaced now, within the budgets of their pools.
    pub async fn choose(&mut self, ctx: &Context, pools: &[ReadyPool], types: &InstanceTypes) -> Vec<String> {
        let now = clock::now();
        let (nodes, mut allowances) = {
            let state = ctx.cluster.read();
            let holds = ctx.derived.holds(&state, now);
            (drifted(&state, &holds), allowances(&state, DisruptionReason::Drifted, now))
        };
        self.backoff_until.retain(|_, until| *until > now);
        for node in &nodes {
            if let Some(blocked_by) = &node.blocked_by {
                emit_blocked(ctx, &node.claim, blocked_by).await;
            }
        }
        let mut chosen = BTreeSet::new();
        let mut simulated = 0;
        let backed_off: BTreeSet<String> = self.backoff_until.keys().cloned().collect();
        for node in order(&nodes, &backed_off) {
            let Some(allowance) = allowances.get_mut(&node.pool).filter(|allowance| allowance.nodes > 0) else {
                continue;
            };
            if node.pods > 0 {
                simulated += 1;
                if simulated > MAX_CANDIDATES {
                    break;
                }
                let mut without = chosen.clone();
                without.insert(node.claim.clone());
                if !simulate(ctx, pools, types, &without, now).await.is_some_and(|outcome| outcome.complete) {
                    self.backoff_until.insert(node.claim.clone(), now + BLOCKED_BACKOFF);
                    emit_blocked(
                        ctx,
                        &node.claim,
                        "its pods fit on no other node, and no node can be launched for them",
                    )
                    .await;
                    continue;
                }
            }
            allowance.nodes -= 1;
            chosen.insert(node.claim.clone());
        }
        chosen.into_iter().collect()
    }
}

async fn emit_blocked(ctx: &Context, claim: &str, why: &str) {
    let claim = ctx.cluster.read().claims.get(claim).cloned();
    if let Some(claim) = claim {
        let note = format!("drifted, but can't be replaced now: {why}");
        ctx.emit_for_claim(&claim, EventSpec::normal("DisruptionBlocked", &note)).await;
    }
}
