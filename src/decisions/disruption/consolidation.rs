//! Multi-node consolidation: nodes whose pods fit on the remaining nodes, or on new nodes that cost less.
//!
//! Candidates are removed in simulation one at a time, cumulatively with those already accepted.

use std::collections::{BTreeMap, BTreeSet};

use crate::decisions::disruption::blocks::budget_block_of_claim;
use crate::decisions::disruption::candidates::{Candidate, PoolAllowance, allowances, candidates};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::disruption::simulate::Outcome;
use crate::model::time::UnixMillis;
use crate::model::units::MicroUsd;
use crate::state::instance_types::InstanceTypes;
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// Maximum number of candidates that one pass simulates.
pub const MAX_CANDIDATES: usize = 20;
/// A node is removed only when that saves at least its price divided by this: moving pods has a cost, too.
const MIN_SAVING_DIVISOR: i64 = 10;

/// One pass over the candidates.
#[derive(Debug)]
pub struct Consolidation {
    /// Claims whose nodes would be candidates, and what blocks their disruption.
    pub blocked: Vec<(String, String)>,
    allowances: BTreeMap<String, PoolAllowance>,
    accepted: BTreeSet<String>,
    saved: i64,
    /// Maximum number of accepted claims. Members of a larger set alone may save nothing.
    most: usize,
}

impl Consolidation {
    /// Begins a pass that accepts at most `most` candidates: returns the candidates to simulate, in order.
    pub fn begin(
        state: &ClusterState,
        holds: &Holds,
        types: &InstanceTypes,
        most: usize,
        now: UnixMillis,
    ) -> (Self, Vec<Candidate>) {
        let allowances = allowances(state, DisruptionReason::Underutilized, now);
        let mut order = candidates(state, holds, types);
        order.retain(|candidate| {
            let pool = state.pools.get(&candidate.pool);
            allowances.get(&candidate.pool).zip(pool).is_some_and(|(allowance, pool)| {
                let held = holds.by_claim.contains_key(&candidate.claim);
                is_eligible(candidate, allowance, &pool.spec.disruption.consolidation_policy, held, now)
            })
        });
        sort_by_price_per_pod(&mut order);
        let mut blocked = Vec::new();
        let mut chosen = Vec::new();
        for candidate in order {
            if chosen.len() == MAX_CANDIDATES {
                break;
            }
            match budget_block_of_claim(state, &candidate.claim) {
                Some(why) => blocked.push((candidate.claim, why)),
                None => chosen.push(candidate),
            }
        }
        (Self { blocked, allowances, accepted: BTreeSet::new(), saved: 0, most }, chosen)
    }

    /// Claims to remove in the simulation of this candidate; `None` when its pool or the pass allows no more.
    pub fn removal(&self, candidate: &Candidate) -> Option<BTreeSet<String>> {
        if self.accepted.len() >= self.most {
            return None;
        }
        self.allowances.get(&candidate.pool).filter(|allowance| allowance.nodes > 0)?;
        let mut without = self.accepted.clone();
        without.insert(candidate.claim.clone());
        Some(without)
    }

    /// Accepts a candidate whose simulated removal saves enough.
    pub fn record(&mut self, candidate: &Candidate, outcome: &Outcome) {
        let Some(saving) = saving(outcome) else { return };
        if saving - self.saved >= candidate.price.0 / MIN_SAVING_DIVISOR {
            self.saved = saving;
            if let Some(allowance) = self.allowances.get_mut(&candidate.pool) {
                allowance.nodes -= 1;
            }
            self.accepted.insert(candidate.claim.clone());
        }
    }

    /// The accepted claims, and what their removal saves per hour.
    pub fn finish(self) -> (Vec<String>, MicroUsd) {
        (self.accepted.into_iter().collect(), MicroUsd(self.saved))
    }
}

/// Whether a candidate may be simulated. `held` says whether a pod is expected on it.
fn is_eligible(candidate: &Candidate, allowance: &PoolAllowance, policy: &str, held: bool, now: UnixMillis) -> bool {
    let quiet = allowance.consolidate_after.is_some_and(|after| candidate.quiet_since.is_older_than(after, now));
    quiet && policy != "WhenEmpty" && candidate.pods > 0 && !candidate.protected && !held
}

/// Hourly saving of a removal, in micro-USD, when it is acceptable.
fn saving(outcome: &Outcome) -> Option<i64> {
    // Replacing a spot node by a spot node would trade a running node for one that may be interrupted sooner. A new node without room for
    // the pods of a DaemonSet costs less only because of that.
    let may_purchase = !outcome.any_spot && !outcome.daemons_left_out;
    (outcome.complete && (outcome.new_nodes == 0 || may_purchase)).then_some(outcome.saving)
}

/// Descending by price per pod that has to move.
fn sort_by_price_per_pod(candidates: &mut [Candidate]) {
    candidates.sort_by(|a, b| {
        let price = |candidate: &Candidate| i128::from(candidate.price.0);
        let pods = |candidate: &Candidate| i128::try_from(candidate.pods).unwrap_or(i128::MAX);
        (price(b) * pods(a)).cmp(&(price(a) * pods(b))).then_with(|| a.claim.cmp(&b.claim))
    });
}

#[cfg(test)]
mod tests;
