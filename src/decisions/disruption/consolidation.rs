//! Consolidation: nodes whose pods fit on the remaining nodes, or on new nodes, at less cost.

pub mod backoff;
pub mod market_value;
pub mod objective;
pub mod order;
pub mod search;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use crate::decisions::disruption::blocks::budget_block_of_claim;
use crate::decisions::disruption::candidates::{Candidate, allowances, candidates};
use crate::decisions::disruption::consolidation::backoff::Backoff;
use crate::decisions::disruption::consolidation::market_value::Market;
use crate::decisions::disruption::consolidation::objective::PoolTerms;
use crate::decisions::disruption::consolidation::order::{Source, by_surplus};
use crate::decisions::disruption::consolidation::search::{IN_TURNS, Judgment, Limits, search};
use crate::decisions::disruption::eviction_cost::{EvictionUnits, of_node, of_node_with_ordinary_pods};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::disruption::simulate::Outcome;
use crate::model::resources::Resources;
use crate::model::time::UnixMillis;
use crate::model::units::MicroUsd;
use crate::state::instance_types::{InstanceTypes, ReadyPool};
use crate::state::object_ext::NodeExt;
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// Maximum number of pods that one decision moves, unless a single node has more.
const MAX_PODS: usize = 3_000;

/// What is known of earlier decisions. Without it a decision repeats attempts in vain, nothing else.
#[derive(Debug, Default)]
pub struct Memory {
    pub backoff: Backoff,
    /// When the next node may be removed that is not quiet for long enough now.
    pub next_eligible: Option<UnixMillis>,
    cursor: String,
    nothing_chosen: Option<NothingChosen>,
    /// Since when the next decision waits for further candidates.
    waits_since: Option<UnixMillis>,
}

/// A decision waits while a further node may be removed within this time, so that they are removed together; for the maximum at most.
const COALESCING: Duration = Duration::from_secs(10);
const MAX_COALESCING: Duration = Duration::from_secs(15);

/// After this time a decision that chose nothing is repeated, even if nothing changed that is compared.
const REPEAT: Duration = Duration::from_mins(5);

/// Decisions that chose nothing in the same situation.
#[derive(Clone, Copy, Debug)]
struct NothingChosen {
    situation: u64,
    since: UnixMillis,
    decisions: usize,
}

/// The parameters of a decision.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Pools that may launch nodes.
    pub pools: &'a [ReadyPool],
    pub types: &'a InstanceTypes,
    /// Maximum number of nodes to remove.
    pub most: usize,
    pub now: UnixMillis,
}

/// The nodes that may be removed now.
#[derive(Debug)]
pub struct Consolidation {
    /// Claims whose nodes would be candidates, and what blocks their disruption.
    pub blocked: Vec<(String, String)>,
    /// NodePools with an invalid annotation, and what to write.
    pub errors: Vec<(String, String)>,
    /// In order.
    sources: Vec<Source>,
    limits: Limits,
    terms: BTreeMap<String, PoolTerms>,
    /// A hash of what the decision depends on, but for changes that are rare: those of Services, volumes and running pods.
    situation: u64,
}

/// The nodes to remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    pub claims: Vec<String>,
    /// Price of the removed nodes less that of the new ones, per hour.
    pub saving: MicroUsd,
    /// Pods that move.
    pub pods: usize,
    pub units: EvictionUnits,
    /// Number of plans.
    pub plans: usize,
}

impl Consolidation {
    /// The candidates.
    pub fn begin(state: &ClusterState, holds: &Holds, memory: &mut Memory, request: Request<'_>) -> Self {
        let Request { pools, types, most, now } = request;
        memory.backoff.forget(now);
        memory.next_eligible = None;
        let last_pod_event = state.last_pod_event.values().max().copied().unwrap_or_default();
        let allowances = allowances(state, DisruptionReason::Underutilized, now);
        let mut out = Self {
            blocked: Vec::new(),
            errors: Vec::new(),
            sources: Vec::new(),
            limits: Limits { nodes: most, pods: MAX_PODS, ..Limits::default() },
            terms: BTreeMap::new(),
            situation: 0,
        };
        for (name, pool) in &state.pools {
            let (terms, errors) = PoolTerms::of(pool);
            out.terms.insert(name.clone(), terms);
            out.errors.extend(errors.into_iter().map(|error| (name.clone(), error)));
        }
        out.limits.of_pools = allowances.iter().map(|(pool, allowance)| (pool.clone(), allowance.nodes)).collect();
        let nodes: Vec<Candidate> =
            candidates(state, holds, types).into_iter().filter(|candidate| candidate.pods > 0).collect();
        let used: BTreeSet<&String> = nodes.iter().map(|candidate| &candidate.pool).collect();
        let market = Market::new(pools.iter().filter(|ready| used.contains(&ready.pool.name_any())));
        for candidate in nodes {
            let (Some(pool), Some(terms)) = (state.pools.get(&candidate.pool), out.terms.get_mut(&candidate.pool))
            else {
                continue;
            };
            let source = source(state, &market, &candidate, now);
            let pods = state.pods_on(&candidate.node);
            terms.add(MicroUsd(source.price.0 - source.surplus), of_node_with_ordinary_pods(pods, now));
            let disruption = &pool.spec.disruption;
            let after = allowances.get(&candidate.pool).and_then(|allowance| allowance.consolidate_after);
            let held = holds.by_claim.contains_key(&candidate.claim);
            let Some(at) = eligible_at(&candidate, after, &disruption.consolidation_policy, held) else { continue };
            if at > now {
                memory.next_eligible = Some(memory.next_eligible.map_or(at, |next| next.min(at)));
            } else if !memory.backoff.leaves_out(&candidate.claim, last_pod_event, now) {
                match budget_block_of_claim(state, &candidate.claim) {
                    Some(why) => out.blocked.push((candidate.claim, why)),
                    None => out.sources.push(source),
                }
            }
        }
        for source in &mut out.sources {
            source.gain =
                source.price.0 - out.terms.get(&source.pool).map_or(0, |terms| terms.eviction_cost(source.units).0);
        }
        by_surplus(&mut out.sources);
        out.situation = out.hash_situation(state, pools, last_pod_event);
        out
    }

    fn hash_situation(&self, state: &ClusterState, pools: &[ReadyPool], last_pod_event: UnixMillis) -> u64 {
        let mut hasher = DefaultHasher::new();
        for source in &self.sources {
            (&source.claim, source.price.0, source.gain, source.pods).hash(&mut hasher);
        }
        (&self.limits.of_pools, self.limits.nodes.min(self.sources.len()), last_pod_event.0).hash(&mut hasher);
        let mut unbound: Vec<&String> = state.unbound.iter().collect();
        unbound.sort_unstable();
        unbound.hash(&mut hasher);
        for ready in pools {
            (ready.pool.name_any(), ready.pool.metadata.generation, Arc::as_ptr(&ready.catalog)).hash(&mut hasher);
        }
        for node in state.nodes.values() {
            let spec = node.spec.as_ref();
            let is_cordoned = spec.and_then(|spec| spec.unschedulable);
            (node.metadata.uid.as_deref(), is_cordoned, node.is_ready()).hash(&mut hasher);
            for taint in spec.and_then(|spec| spec.taints.as_ref()).into_iter().flatten() {
                (&taint.key, &taint.value, &taint.effect).hash(&mut hasher);
            }
        }
        hasher.finish()
    }

    /// Number of candidates.
    pub fn candidates(&self) -> usize {
        self.sources.len()
    }

    /// The claims of the candidates.
    pub fn claims_of_candidates(&self) -> impl Iterator<Item = &str> {
        self.sources.iter().map(|source| source.claim.as_str())
    }

    /// Whether the decision waits for a further candidate.
    pub fn waits(&self, memory: &mut Memory, now: UnixMillis) -> bool {
        let is_soon = memory.next_eligible.is_some_and(|at| at <= now + COALESCING);
        if self.sources.is_empty() || !is_soon || self.is_decided(memory, now) {
            memory.waits_since = None;
            return false;
        }
        // A time in the future is from before the clock was set back.
        let since = memory.waits_since.filter(|since| *since <= now).unwrap_or(now);
        memory.waits_since = Some(since);
        if since.is_older_than(MAX_COALESCING, now) {
            memory.waits_since = None;
            return false;
        }
        true
    }

    /// Whether nothing would be chosen, because earlier decisions of the same situation tried every candidate.
    pub fn is_decided(&self, memory: &Memory, now: UnixMillis) -> bool {
        // With many candidates, some are tried in turns.
        let decisions = self.nothing_chosen(memory, now).map_or(0, |last| last.decisions);
        decisions >= self.sources.len().div_ceil(IN_TURNS)
    }

    fn nothing_chosen(&self, memory: &Memory, now: UnixMillis) -> Option<NothingChosen> {
        memory.nothing_chosen.filter(|last| last.situation == self.situation && !last.since.is_older_than(REPEAT, now))
    }

    /// Decides. `simulate` plans the removal of claims besides `waiting` other pods, `None` where the planner fails. Takes as long as that does
    /// for each set that is tried.
    pub fn decide(
        &self,
        memory: &mut Memory,
        waiting: usize,
        mut simulate: impl FnMut(&BTreeSet<String>) -> Option<Outcome>,
        now: UnixMillis,
    ) -> Decision {
        if self.is_decided(memory, now) {
            return Decision::default();
        }
        let mut best = (0, MicroUsd(0));
        let limits = Limits { waiting, ..self.limits.clone() };
        let choice = search(&self.sources, &limits, &memory.cursor, |set| {
            let Some(outcome) = simulate(&self.claims(set)) else { return Judgment::Unknown };
            let is_stuck = |at: &&usize| outcome.obstacles.contains_key(&self.sources[**at].claim);
            let stuck: BTreeSet<usize> = set.iter().filter(is_stuck).copied().collect();
            if !stuck.is_empty() {
                return Judgment::Stuck(stuck);
            }
            let found = self.worth(set, &outcome);
            best = best.max(found);
            Judgment::Worth(found.0)
        });
        memory.cursor = choice.cursor;
        let last = self.nothing_chosen(memory, now);
        let nothing = NothingChosen {
            situation: self.situation,
            since: last.map_or(now, |last| last.since),
            decisions: last.map_or(0, |last| last.decisions) + 1,
        };
        memory.nothing_chosen = choice.chosen.is_empty().then_some(nothing);
        for claim in self.claims(&choice.stuck) {
            memory.backoff.blocked(&claim, now);
        }
        let chosen = || choice.chosen.iter().map(|at| &self.sources[*at]);
        Decision {
            claims: self.claims(&choice.chosen).into_iter().collect(),
            saving: best.1,
            pods: chosen().map(|source| source.pods).sum(),
            units: EvictionUnits(chosen().map(|source| source.units.0).sum()),
            plans: choice.plans,
        }
    }

    fn claims(&self, set: &BTreeSet<usize>) -> BTreeSet<String> {
        set.iter().map(|at| self.sources[*at].claim.clone()).collect()
    }

    /// What a removal is worth, micro-USD per hour, and what it saves.
    fn worth(&self, set: &BTreeSet<usize>, outcome: &Outcome) -> (i64, MicroUsd) {
        let sum = |of: &dyn Fn(&Source) -> i64| set.iter().map(|at| of(&self.sources[*at])).sum::<i64>();
        let purchases: i64 = outcome.purchases.values().map(|price| price.0).sum();
        let cost_of = |(pool, price): (&Arc<str>, &MicroUsd)| self.terms_of(pool).purchase_cost(*price).0;
        let cost: i64 = outcome.purchases.iter().map(cost_of).sum();
        let saving = sum(&|source| source.price.0) - purchases;
        let worth = sum(&|source| source.gain) - cost;
        let needed = sum(&|source| self.terms_of(&source.pool).needed_saving(source.price, purchases > 0).0);
        (if saving < needed { worth.min(0) } else { worth }, MicroUsd(saving))
    }

    fn terms_of(&self, pool: &str) -> PoolTerms {
        self.terms.get(pool).copied().unwrap_or_default()
    }
}

/// When a candidate may be removed. `held` says whether a pod is expected on it.
fn eligible_at(candidate: &Candidate, after: Option<Duration>, policy: &str, held: bool) -> Option<UnixMillis> {
    let may_leave = policy != "WhenEmpty" && candidate.pods > 0 && !candidate.protected && !held;
    after.filter(|_| may_leave).map(|after| candidate.quiet_since + after)
}

/// A candidate with the market value of its pods and what their eviction costs. Its gain is not known yet.
fn source(state: &ClusterState, market: &Market, candidate: &Candidate, now: UnixMillis) -> Source {
    let pods = || state.pods_on(&candidate.node).filter(|pod| pod.needs_another_node());
    let (mut load, mut largest) = (Resources::default(), Resources::default());
    for entry in pods().filter_map(|pod| pod.entry.as_ref().ok()) {
        load.add(&entry.class.requests);
        largest.raise_to(&entry.class.requests);
    }
    // Where nothing can be bought, the pods are worth what they cost now.
    let market_value = market.value(&candidate.pool, &load, &largest).unwrap_or(candidate.price);
    Source {
        claim: candidate.claim.clone(),
        pool: candidate.pool.clone(),
        price: candidate.price,
        pods: candidate.pods,
        units: of_node(pods(), now),
        surplus: candidate.price.0.saturating_sub(market_value.0),
        gain: 0,
    }
}

#[cfg(test)]
mod tests;
