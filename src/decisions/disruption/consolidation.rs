//! Consolidation: nodes whose pods fit on the remaining nodes, or on new nodes, at less cost.

pub mod backoff;
pub mod balanced;
pub mod market_value;
mod newest;
pub mod objective;
pub mod order;
pub mod rooms;
pub mod search;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;

use crate::decisions::disruption::blockers::{Blocker, surging_budget_block};
use crate::decisions::disruption::candidates::{Candidate, PoolAllowance, allowances, candidate};
use crate::decisions::disruption::consolidation::backoff::Backoff;
use crate::decisions::disruption::consolidation::balanced::Score;
use crate::decisions::disruption::consolidation::market_value::{Floor, Market};
use crate::decisions::disruption::consolidation::newest::Newest;
use crate::decisions::disruption::consolidation::objective::PoolTerms;
use crate::decisions::disruption::consolidation::order::{Source, by_surplus};
use crate::decisions::disruption::consolidation::rooms::Room;
use crate::decisions::disruption::consolidation::search::{Judged, Judgment, Limits, search};
use crate::decisions::disruption::eviction_cost::EvictionUnits;
use crate::decisions::disruption::moves::Move;
use crate::decisions::disruption::node_facts::{Facts, NodeFacts};
use crate::decisions::disruption::obstacle::Obstacle;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::disruption::simulated_removal::SimulatedRemoval;
use crate::decisions::disruption::size::{Size, size};
use crate::decisions::disruption::verdicts::Verdict;
use crate::state::object_ext::{NodeClaimExt, NodeExt};
use crate::state::plan_record::Holds;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot_cache::NodeRef;
use crate::state::tables::ClusterState;

/// Maximum number of pods that one decision moves, unless a single node has more.
const MAX_PODS: usize = 3_000;

/// What is known of earlier decisions. Without it a decision repeats attempts in vain, nothing else.
#[derive(Debug, Default)]
pub struct Memory {
    pub backoff: Backoff,
    /// When the next node may be removed that is not quiet for long enough now.
    pub next_eligible: Option<UnixMillis>,
    /// Why candidates were not chosen when a decision last tried them, by claim.
    found: BTreeMap<String, Blocker>,
    cursor: String,
    nothing_chosen: Option<NothingChosen>,
    /// Since when the next decision waits for further candidates.
    waits_since: Option<UnixMillis>,
    market: MarketCache,
}

/// The market, which changes only with the NodePools and their catalogs.
#[derive(Debug, Default)]
struct MarketCache {
    pools: Vec<ReadyPool>,
    market: Arc<Market>,
    floor: Floor,
}

impl Memory {
    /// Records that moves do not pay by themselves. Their nodes are tried again later.
    pub fn dropped(&mut self, moves: &[(Move, Blocker)], now: UnixMillis) {
        for (one, why) in moves {
            one.sources.keys().for_each(|claim| self.backoff.dropped(claim, why.clone(), now));
        }
    }
}

impl MarketCache {
    fn update(&mut self, pools: &[ReadyPool]) {
        let is_same = |(a, b): (&ReadyPool, &ReadyPool)| {
            let generation = |ready: &ReadyPool| (ready.pool.metadata.uid.clone(), ready.pool.metadata.generation);
            (Arc::ptr_eq(&a.pool, &b.pool) || generation(a).1.is_some() && generation(a) == generation(b))
                && Arc::ptr_eq(&a.catalog, &b.catalog)
        };
        if self.pools.len() != pools.len() || !self.pools.iter().zip(pools).all(is_same) {
            self.pools = pools.to_vec();
            self.market = Arc::new(Market::new(pools.iter()));
            self.floor = self.market.floor();
        }
    }
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
    /// Number of candidates that they tried.
    tried: usize,
}

/// The parameters of a decision.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Pools that may launch nodes.
    pub pools: &'a [ReadyPool],
    pub facts: &'a Facts,
    /// Maximum number of nodes to remove.
    pub most: usize,
    pub now: UnixMillis,
}

/// The nodes that may be removed now.
#[derive(Debug)]
pub struct Consolidation {
    /// Nodes that are not candidates, and why.
    stays: Vec<Verdict>,
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

/// The moves of a decision, each judged by itself.
#[derive(Debug, Default)]
pub struct Priced {
    pub pay: Vec<Move>,
    /// Those that do not pay, whose score is not approved, or that have too few alternatives, and why their nodes stay.
    pub others: Vec<(Move, Blocker)>,
}

impl Consolidation {
    /// The candidates.
    pub fn begin(state: &ClusterState, holds: &Holds, memory: &mut Memory, request: Request<'_>) -> Self {
        let Request { pools, facts, most, now } = request;
        memory.backoff.forget(now);
        memory.next_eligible = None;
        let last_pod_event = state.last_pod_event.values().max().copied().unwrap_or_default();
        let allowances = allowances(state, DisruptionReason::Underutilized, now);
        let mut out = Self {
            stays: Vec::new(),
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
        for claim in state.in_flight.iter().filter_map(|name| state.claims.get(name)) {
            let blocker = if claim.is_leaving() { Blocker::Leaving } else { Blocker::NotInitialized };
            out.stays.push(Verdict::stays(claim.name_any(), facts.types.price(claim), blocker));
        }
        memory.market.update(pools);
        let market = Arc::clone(&memory.market.market);
        out.limits.floor.clone_from(&memory.market.floor);
        let newest = Newest::of(state, &out.terms);
        for node in &facts.nodes {
            if let Some(terms) = out.terms.get_mut(&node.pool) {
                terms.add_to_totals(node.price, node.settled_units.0);
            }
        }
        for node in &facts.nodes {
            let candidate = match candidate(state, holds, node) {
                Ok(candidate) => candidate,
                Err(blocker) => {
                    out.stays.push(Verdict::stays(node.claim.clone(), node.price, blocker));
                    continue;
                }
            };
            let (mut units, ordinary_units) = node.units(state, now);
            if out.terms.get(&node.pool).is_some_and(PoolTerms::is_balanced) {
                // The score ignores the age of pods.
                units = node.settled_units.0;
            }
            let source = source(&market, &candidate, units);
            if let Some(terms) = out.terms.get_mut(&node.pool).filter(|_| candidate.pods > 0) {
                terms.add(MicroUsd(source.price.0 - source.surplus), ordinary_units);
            }
            let allowance = allowances.get(&node.pool);
            let mut blockers = blockers(state, holds, &candidate, allowance, now);
            if blockers.is_empty()
                && let Some(interval) = out.terms.get(&node.pool).and_then(PoolTerms::min_eviction_interval)
            {
                blockers.extend(newest.block(node, interval, now));
            }
            if candidate.pods > 0 {
                if let [blocker] = &blockers[..]
                    && let Some(at) = blocker.until()
                {
                    memory.next_eligible = Some(memory.next_eligible.map_or(at, |next| next.min(at)));
                } else if blockers.is_empty() {
                    let backed_off = memory.backoff.leaves_out(&node.claim, candidate.quiet_since, last_pod_event, now);
                    blockers.extend(backed_off.cloned().or_else(|| limit(allowance, most)));
                }
            } else if blockers.is_empty() {
                // The loop of empty nodes removes it.
                blockers.push(Blocker::Undecided);
            }
            if blockers.is_empty() {
                out.sources.push(source);
            } else {
                let Source { claim, price, surplus, .. } = source;
                out.stays.push(Verdict { claim, price, saving: MicroUsd(surplus), blockers });
            }
        }
        for source in &mut out.sources {
            source.gain =
                source.price.0 - out.terms.get(&source.pool).map_or(0, |terms| terms.eviction_cost(source.units).0);
        }
        by_surplus(&mut out.sources);
        let candidates: BTreeSet<&str> = out.claims_of_candidates().collect();
        memory.found.retain(|claim, _| candidates.contains(&**claim));
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
            // The planner ignores the planned taint, which nodes have while pods move.
            for taint in node.taints().filter(|taint| taint.key != labels::PLANNED_TAINT) {
                (&taint.key, &taint.value, &taint.effect).hash(&mut hasher);
            }
        }
        hasher.finish()
    }

    /// The indexes of the candidates, by claim.
    fn indexes(&self) -> HashMap<&str, usize> {
        self.sources.iter().enumerate().map(|(at, source)| (&*source.claim, at)).collect()
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
        self.nothing_chosen(memory, now).map_or(0, |last| last.tried) >= self.sources.len()
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
        mut simulate: impl FnMut(&BTreeSet<String>) -> Option<SimulatedRemoval>,
        now: UnixMillis,
    ) -> Decision {
        if self.is_decided(memory, now) {
            return Decision::default();
        }
        let mut trials = Trials::default();
        let cluster = self.stays.len() + self.sources.len();
        let at_of = self.indexes();
        let at = |claim: &str| at_of.get(claim).copied();
        let rooms = |outcome: &SimulatedRemoval| {
            let source = |node: &NodeRef| at(node.claim.as_deref()?);
            let rooms = outcome.rooms.iter();
            rooms.map(|(node, free)| Room { source: node.as_deref().and_then(source), free: *free }).collect()
        };
        let present = simulate(&BTreeSet::new()).map(|outcome| rooms(&outcome)).unwrap_or_default();
        let limits = Limits { waiting, cluster, rooms: present, ..self.limits.clone() };
        let choice = search(&self.sources, &limits, &memory.cursor, |set| {
            let Some(outcome) = simulate(&self.claims(set)) else { return Judgment::Unknown };
            let obstacle = |at: &usize| Some((*at, outcome.obstacles.get(&self.sources[*at].claim)?));
            let stuck: BTreeMap<usize, &Obstacle> = set.iter().filter_map(obstacle).collect();
            if !stuck.is_empty() {
                trials.stuck(set, &stuck);
                return Judgment::Stuck(stuck.into_keys().collect());
            }
            let found = self.worth(set, &outcome.purchases);
            trials.judged(set, found);
            Judgment::Worth(Judged {
                worth: found.worth,
                rooms: rooms(&outcome),
                bought: outcome.bought.iter().filter_map(|(claim, cost)| Some((at(claim)?, cost.0))).collect(),
                load_of_new: outcome.load_of_new,
            })
        });
        memory.cursor = choice.cursor;
        let last = self.nothing_chosen(memory, now);
        let nothing = NothingChosen {
            situation: self.situation,
            since: last.map_or(now, |last| last.since),
            tried: last.map_or(0, |last| last.tried) + choice.tried,
        };
        memory.nothing_chosen = choice.chosen.is_empty().then_some(nothing);
        for (at, source) in self.sources.iter().enumerate() {
            if let Some(obstacle) = trials.alone.remove(&at) {
                memory.backoff.blocked(&source.claim, obstacle.clone(), now);
                memory.found.insert(source.claim.clone(), Blocker::Obstacle(obstacle));
            } else if source.gain <= 0 {
                let needed = MicroUsd(source.price.0 - source.gain);
                memory.found.insert(source.claim.clone(), Blocker::SavesTooLittle { saving: source.price, needed });
            } else if let Some(Worth { worth, saving, needed }) = trials.added.get(&at).copied() {
                if worth > 0 {
                    // The chosen set is better.
                    memory.found.remove(&source.claim);
                } else {
                    memory.found.insert(source.claim.clone(), Blocker::SavesTooLittle { saving, needed });
                }
            } else if let Some(cost) = choice.worthless.get(&at).filter(|_| !choice.chosen.contains(&at)) {
                let saving = MicroUsd(source.price.0.saturating_sub(*cost));
                let needed = MicroUsd(source.price.0 - source.gain);
                memory.found.insert(source.claim.clone(), Blocker::SavesTooLittle { saving, needed });
            }
        }
        let chosen = || choice.chosen.iter().map(|at| &self.sources[*at]);
        Decision {
            claims: self.claims(&choice.chosen).into_iter().collect(),
            saving: trials.best.saving,
            pods: chosen().map(|source| source.pods).sum(),
            units: EvictionUnits(chosen().map(|source| source.units.0).sum()),
            plans: choice.plans,
        }
    }

    /// Judges each move by itself. Those that pay have the most that their new nodes may cost, which leaves the saving that is needed.
    pub fn priced(&self, moves: Vec<Move>) -> Priced {
        let (at_of, mut out) = (self.indexes(), Priced::default());
        for mut one in moves {
            let set: Option<BTreeSet<usize>> = one.sources.keys().map(|claim| at_of.get(&**claim).copied()).collect();
            let Some(set) = set else { continue };
            let Worth { worth, saving, needed } = self.worth(&set, &one.purchases());
            one.limit_prices(MicroUsd(saving.0 - needed.0));
            one.scores = self.scores(&set, saving);
            if worth > 0 && one.scores.values().all(Score::is_approved) {
                match one.limit_alternatives() {
                    Ok(()) => out.pay.push(one),
                    Err(types) => out.others.push((one, Blocker::Obstacle(Obstacle::FewAlternatives(types)))),
                }
                continue;
            }
            let needed = one.scores.values().map(|score| score.needed(saving)).fold(needed, MicroUsd::max);
            out.others.push((one, Blocker::SavesTooLittle { saving, needed }));
        }
        out
    }

    /// The score of the removal of a set for each of its NodePools with the policy `Balanced`. The saving is divided by the price of the nodes.
    fn scores(&self, set: &BTreeSet<usize>, saving: MicroUsd) -> BTreeMap<String, Score> {
        let mut of_pools: BTreeMap<&String, (i64, i64)> = BTreeMap::new();
        for source in set.iter().map(|at| &self.sources[*at]) {
            let (price, units) = of_pools.entry(&source.pool).or_default();
            *price += source.price.0;
            *units += source.units.0;
        }
        let total: i64 = of_pools.values().map(|(price, _)| price).sum();
        let score = |(pool, (price, units)): (&String, (i64, i64))| {
            let share = i128::from(saving.0) * i128::from(price) / i128::from(total.max(1));
            let share = MicroUsd(i64::try_from(share).unwrap_or(i64::MAX));
            Some((pool.clone(), self.terms_of(pool).score(share, EvictionUnits(units))?))
        };
        of_pools.into_iter().filter_map(score).collect()
    }

    /// The verdict about every node, given the claims that are removed. Candidates that this decision did not try keep the last verdict.
    pub fn verdicts(&self, memory: &Memory, removed: &[String]) -> Vec<Verdict> {
        let removed: BTreeSet<&String> = removed.iter().collect();
        let of_source = |source: &Source| {
            let found = || memory.found.get(&source.claim).cloned().unwrap_or(Blocker::Undecided);
            let blockers = if removed.contains(&source.claim) { Vec::new() } else { vec![found()] };
            let (claim, saving) = (source.claim.clone(), MicroUsd(source.surplus));
            Verdict { claim, price: source.price, saving, blockers }
        };
        self.stays.iter().cloned().chain(self.sources.iter().map(of_source)).collect()
    }

    fn claims(&self, set: &BTreeSet<usize>) -> BTreeSet<String> {
        set.iter().map(|at| self.sources[*at].claim.clone()).collect()
    }

    fn worth(&self, set: &BTreeSet<usize>, purchases: &BTreeMap<Arc<str>, MicroUsd>) -> Worth {
        let sum = |of: &dyn Fn(&Source) -> i64| set.iter().map(|at| of(&self.sources[*at])).sum::<i64>();
        let cost_of = |(pool, price): (&Arc<str>, &MicroUsd)| self.terms_of(pool).purchase_cost(*price).0;
        let cost: i64 = purchases.iter().map(cost_of).sum();
        let purchases: i64 = purchases.values().map(|price| price.0).sum();
        let saving = sum(&|source| source.price.0) - purchases;
        let worth = sum(&|source| source.gain) - cost;
        let least = sum(&|source| self.terms_of(&source.pool).needed_saving(source.price, purchases > 0).0);
        let needed = MicroUsd(least.max(saving - worth));
        Worth { worth: if saving < least { worth.min(0) } else { worth }, saving: MicroUsd(saving), needed }
    }

    fn terms_of(&self, pool: &str) -> PoolTerms {
        self.terms.get(pool).copied().unwrap_or_default()
    }
}

/// The worth of the removal of a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Worth {
    /// Micro-USD per hour.
    worth: i64,
    /// Per hour: the price of the removed nodes less that of the new ones.
    saving: MicroUsd,
    /// The saving that pays for the evictions and new nodes.
    needed: MicroUsd,
}

impl Worth {
    fn less(self, other: Self) -> Self {
        Self {
            worth: self.worth - other.worth,
            saving: MicroUsd(self.saving.0 - other.saving.0),
            needed: MicroUsd(self.needed.0 - other.needed.0),
        }
    }
}

/// What a search found about single sources.
#[derive(Debug, Default)]
struct Trials {
    set: BTreeSet<usize>,
    /// Worth of the best set so far.
    best: Worth,
    /// What each source adds to the best set at the time when it was tried.
    added: BTreeMap<usize, Worth>,
    /// Why sources cannot be removed even alone.
    alone: BTreeMap<usize, Obstacle>,
}

impl Trials {
    fn stuck(&mut self, set: &BTreeSet<usize>, stuck: &BTreeMap<usize, &Obstacle>) {
        if set.len() == 1 {
            self.alone.extend(stuck.iter().map(|(at, obstacle)| (*at, (*obstacle).clone())));
        }
    }

    fn judged(&mut self, set: &BTreeSet<usize>, found: Worth) {
        let base = if self.set.is_subset(set) { (self.set.len(), self.best) } else { (0, Worth::default()) };
        if set.len() == base.0 + 1
            && let Some(at) = set.iter().find(|at| base.0 == 0 || !self.set.contains(at))
        {
            self.added.insert(*at, found.less(base.1));
        }
        if found.worth > self.best.worth {
            (self.set, self.best) = (set.clone(), found);
        }
    }
}

/// What blocks the removal of a candidate: all that lasts until a user or the cluster changes it, or else what passes by itself.
fn blockers(
    state: &ClusterState,
    holds: &Holds,
    candidate: &Candidate<'_>,
    allowance: Option<&PoolAllowance>,
    now: UnixMillis,
) -> Vec<Blocker> {
    let Candidate { facts, pods, quiet_since } = candidate;
    let policy = state.pools.get(&facts.pool).map(|pool| &*pool.spec.disruption.consolidation_policy);
    let after = allowance.map(|allowance| allowance.consolidate_after);
    let found = [
        (policy.is_none(), Blocker::NoNodePool),
        (after == Some(None), Blocker::Never),
        (policy == Some("WhenEmpty") && *pods > 0, Blocker::WhenEmpty),
        (facts.price.0 <= 0, Blocker::NoPrice),
    ];
    let found = found.into_iter().filter(|(applies, _)| *applies).map(|(_, blocker)| blocker);
    let held = holds.by_claim.get(&facts.claim).map(|held| Blocker::Nominated(held.len()));
    let mut out: Vec<Blocker> = found.chain(facts.protection.clone()).chain(held).collect();
    if out.is_empty() {
        let quiet_at = *quiet_since + after.flatten().unwrap_or_default();
        let not_quiet = (quiet_at > now).then_some(Blocker::NotQuiet(quiet_at));
        out.extend(not_quiet.or_else(|| surging_budget_block(state, &facts.node)));
    }
    out
}

/// What keeps a candidate although nothing blocks its removal. `most` nodes may be removed.
fn limit(allowance: Option<&PoolAllowance>, most: usize) -> Option<Blocker> {
    if allowance.is_none_or(|allowance| allowance.nodes <= 0) {
        return Some(Blocker::NodePoolBudget);
    }
    (most == 0).then_some(Blocker::RateCap)
}

/// A candidate with the market value of its pods and what their eviction costs. Its gain is not known yet.
fn source(market: &Market, candidate: &Candidate<'_>, units: EvictionUnits) -> Source {
    let NodeFacts { claim, pool, price, load, largest, pods, .. } = candidate.facts;
    // Where nothing can be bought, the pods are worth what they cost now.
    let market_value = market.value(pool, load, largest).unwrap_or(*price);
    let mut sizes: Vec<Size> = pods.iter().map(|entry| size(&entry.class.requests)).collect();
    sizes.sort_unstable_by_key(|size| Reverse(*size));
    Source {
        claim: claim.clone(),
        pool: pool.clone(),
        price: *price,
        pods: candidate.pods,
        units,
        sizes,
        surplus: price.0.saturating_sub(market_value.0),
        gain: 0,
    }
}

#[cfg(test)]
mod tests;
