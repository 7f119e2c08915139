//! Isolates the NodePools and nodes that the planner panics over, whatever pods it plans.

use std::sync::Arc;

use kube::ResourceExt;

use crate::clock;
use crate::controllers::context::{Context, reference};
use crate::controllers::provisioning::isolation::{Planner, plan};
use crate::decisions::provisioning::culprit_search::{CulpritSearch, Verdict};
use crate::decisions::provisioning::supply_quarantine::Source;
use crate::model::events;
use crate::planner::columns::table::ColumnCache;
use crate::planner::input::pod::PodEntry;
use crate::state::snapshot::{NodeUse, Snapshot};
use crate::sync::lock;

/// Maximum number of plans that one pass makes in search of NodePools and nodes.
pub const MAX_TRIALS: usize = 32;
/// Maximum number of NodePools and nodes that one search emits events for.
const MAX_EVENTS: usize = 50;
/// The share of NodePools and nodes that may be blamed where pods may be the cause: this many, or this percentage if that is more.
const MAX_BLAMED: (usize, usize) = (3, 10);

/// The pods of the trials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trials {
    /// A pod that nobody wrote: what a plan of it fails over is a NodePool or a node.
    Probe,
    /// All pods of the snapshot.
    Pods,
}

/// Searches for the NodePools and nodes that a plan of this snapshot fails over, and leaves them out for a while. Returns the snapshot
/// without them; `None` when they are not the cause.
pub async fn isolate_supply(
    ctx: &Arc<Context>,
    planner: Planner,
    snapshot: &Snapshot,
    trials: Trials,
    trials_left: &mut usize,
) -> Option<Snapshot> {
    let sources = Source::all(snapshot);
    let cache = ColumnCache::default();
    let mut all = snapshot.of_pods(&(0..snapshot.problem.pods.len()).collect::<Vec<_>>(), &cache);
    if trials == Trials::Probe {
        all.problem.pods = vec![PodEntry::probe()];
        if passes(planner, &all, &sources, &Verdict::all(sources.len()), NodeUse::None, trials_left).await {
            return None;
        }
    }
    // A plan without any NodePool or node fails over something else.
    if !passes(planner, &all, &sources, &Verdict::default(), NodeUse::None, trials_left).await {
        return None;
    }
    let mut search = {
        let quarantine = lock(&ctx.supply_quarantine);
        CulpritSearch::of_inputs(sources.len(), |source| quarantine.has_failed(&sources[source]), *trials_left)
    };
    while let Some(trial) = search.trial() {
        let trial = Verdict { accepted: trial, ..Verdict::default() };
        search.record(passes(planner, &all, &sources, &trial, NodeUse::None, trials_left).await);
    }
    let verdict = search.finish();
    let left_out = sources.len() - verdict.accepted.len();
    tracing::warn!(
        sources = sources.len(),
        left_out,
        culprits = verdict.culprits.len(),
        "searched for the node pools and nodes that a plan fails over"
    );
    let blamable = MAX_BLAMED.0.max(sources.len() * MAX_BLAMED.1 / 100);
    if left_out == 0 || (trials == Trials::Pods && left_out > blamable) {
        return None;
    }
    let keeps_pods = passes(planner, &all, &sources, &verdict, NodeUse::PodsOnly, &mut 1).await;
    let of_others = if keeps_pods { NodeUse::PodsOnly } else { NodeUse::None };
    quarantine(ctx, &sources, &verdict, keeps_pods);
    let mut rest = snapshot.of_pods(&(0..snapshot.problem.pods.len()).collect::<Vec<_>>(), &cache);
    restrict(&mut rest, &sources, &verdict, of_others);
    Some(rest)
}

/// Whether a plan with the accepted sources passes. Of the other nodes it has `of_others`.
async fn passes(
    planner: Planner,
    all: &Snapshot,
    sources: &[Source],
    verdict: &Verdict,
    of_others: NodeUse,
    trials_left: &mut usize,
) -> bool {
    *trials_left = trials_left.saturating_sub(1);
    let mut tried = all.of_pods(&(0..all.problem.pods.len()).collect::<Vec<_>>(), &all.column_cache);
    restrict(&mut tried, sources, verdict, of_others);
    plan(planner, &Arc::new(tried)).await.is_some()
}

fn restrict(snapshot: &mut Snapshot, sources: &[Source], verdict: &Verdict, of_others: NodeUse) {
    let pools = snapshot.problem.pools.len();
    let mut accepted = vec![false; sources.len()];
    verdict.accepted.iter().for_each(|source| accepted[*source] = true);
    let (of_pools, of_nodes) = accepted.split_at(pools);
    let (mut of_pools, mut of_nodes) = (of_pools.iter(), of_nodes.iter());
    snapshot.restrict(
        |_| of_pools.next() == Some(&true),
        |_| if of_nodes.next() == Some(&true) { NodeUse::Whole } else { of_others },
    );
}

/// Leaves out and reports what is not accepted.
fn quarantine(ctx: &Arc<Context>, sources: &[Source], verdict: &Verdict, keeps_pods: bool) {
    let rejected = verdict.culprits.iter().chain(&verdict.untried);
    quarantine_sources(ctx, rejected.map(|source| sources[*source].clone()), keeps_pods);
}

/// Leaves out and reports NodePools and nodes that the planner panics over.
pub fn quarantine_sources(ctx: &Arc<Context>, sources: impl Iterator<Item = Source>, keeps_pods: bool) {
    let now = clock::now();
    let mut notes = Vec::new();
    {
        let state = ctx.cluster.read();
        let mut quarantine = lock(&ctx.supply_quarantine);
        quarantine.retain(|source| match source {
            Source::NodePool(name) => state.pools.contains_key(&**name),
            Source::Node(name) => state.nodes.contains_key(&**name) || state.claims.contains_key(&**name),
        });
        for source in sources {
            let pool = state.pools.get(source.name()).filter(|_| matches!(source, Source::NodePool(_)));
            let generation = pool.and_then(|pool| pool.metadata.generation);
            let seconds = quarantine.add(source.clone(), generation, keeps_pods, now).as_secs();
            if notes.len() >= MAX_EVENTS {
                continue;
            }
            let (kind, name) = (source.kind(), source.name());
            tracing::warn!(kind, name, seconds, keeps_pods, "left out of plans, the planner panics over it");
            let node = || state.nodes.get(name).map(|node| reference(&**node));
            let claim = || state.claims.get(name).map(|claim| reference(&**claim));
            let about = pool.map(|pool| reference(&**pool)).or_else(node).or_else(claim);
            let note = format!("left out of plans for {seconds} s: the planner panics over it, which is a defect");
            notes.extend(about.map(|about| (about, note)));
        }
    }
    let ctx = Arc::clone(ctx);
    tokio::spawn(async move {
        for (about, note) in notes {
            ctx.emit(about, events::QUARANTINED.note(&note)).await;
        }
    });
}

impl Context {
    /// Whether the node of a NodeClaim is left out of plans. It is not disrupted meanwhile: what a plan without it says about it is
    /// unknown.
    pub fn is_left_out_of_plans(&self, claim: &str) -> bool {
        let node = {
            let state = self.cluster.read();
            state.claims.get(claim).and_then(|claim| state.node_of(claim)).map(|node| node.name_any())
        };
        let (quarantine, now) = (lock(&self.supply_quarantine), clock::now());
        let names = node.iter().map(String::as_str).chain([claim]);
        names.map(|name| Source::Node(Arc::from(name))).any(|source| quarantine.is_left_out(&source, now))
    }
}
