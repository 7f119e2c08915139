//! Isolates the NodePools, nodes and DaemonSets that the planner panics over, whatever pods it plans.
//!
//! Volumes, Services and the labels of namespaces need no search of their own: the planner reads them for a pod only, so that the pod or the
//! node that it runs on is found.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt;
use stowage_model::events;
use stowage_planner::{ColumnCache, PodEntry};
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::controllers::context::{Context, reference};
use crate::controllers::provisioning::isolation::{Planner, plan};
use crate::decisions::provisioning::culprit_search::{CulpritSearch, Verdict};
use crate::decisions::provisioning::supply_quarantine::Source;
use crate::state::snapshot::{NodeUse, Snapshot};

/// Maximum number of plans that one pass makes in search of NodePools, nodes and DaemonSets.
pub const MAX_TRIALS: usize = 32;
/// Maximum number of NodePools, nodes and DaemonSets that one search emits events for.
const MAX_EVENTS: usize = 50;
/// The share of NodePools, nodes and DaemonSets that may be blamed where pods may be the cause: this many, or this percentage if that is more.
const MAX_BLAMED: (usize, usize) = (3, 10);

/// The pods of the trials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trials {
    /// A pod that nobody wrote: what a plan of it fails over is a NodePool, a node or a DaemonSet.
    Probe,
    /// All pods of the snapshot.
    Pods,
}

/// Searches for the NodePools, nodes and DaemonSets that a plan of this snapshot fails over, and leaves them out for a while. Returns the
/// snapshot without them; `None` when they are not the cause.
pub async fn isolate_supply(
    ctx: &Arc<Context>,
    planner: Planner,
    snapshot: &Snapshot,
    trials: Trials,
    trials_left: &mut usize,
) -> Option<Snapshot> {
    let (sources, daemons) = (Source::pools_and_nodes(snapshot), Source::daemon_sets(snapshot));
    let cache = ColumnCache::default();
    let mut all = snapshot.of_pods(&(0..snapshot.problem.pods.len()).collect::<Vec<_>>(), &cache);
    let mut with = Accepted { sources: Verdict::all(sources.len()), daemons: Verdict::all(daemons.len()) };
    if trials == Trials::Probe {
        all.problem.pods = vec![PodEntry::probe()];
        if passes(planner, &all, &with, NodeUse::None, trials_left).await {
            return None;
        }
    }
    // The planner reads a DaemonSet for each NodePool and node: without any, they are found innocent.
    with.daemons = Verdict::default();
    if daemons.is_empty() || !passes(planner, &all, &with, NodeUse::None, trials_left).await {
        // A plan without any NodePool or node fails over something else.
        with.sources = Verdict::default();
        if !passes(planner, &all, &with, NodeUse::None, trials_left).await {
            return None;
        }
        let mut search = search(ctx, &sources, *trials_left);
        while let Some(trial) = search.trial() {
            with.sources = Verdict { accepted: trial, ..Verdict::default() };
            search.record(passes(planner, &all, &with, NodeUse::None, trials_left).await);
        }
        with.sources = search.finish();
    }
    if !daemons.is_empty() {
        with.daemons = Verdict::all(daemons.len());
        if !passes(planner, &all, &with, NodeUse::None, trials_left).await {
            let mut search = search(ctx, &daemons, *trials_left);
            while let Some(trial) = search.trial() {
                with.daemons = Verdict { accepted: trial, ..Verdict::default() };
                search.record(passes(planner, &all, &with, NodeUse::None, trials_left).await);
            }
            with.daemons = search.finish();
        }
    }
    let left_out = |verdict: &Verdict, of: &[Source]| of.len() - verdict.accepted.len();
    let (sources_left_out, daemons_left_out) = (left_out(&with.sources, &sources), left_out(&with.daemons, &daemons));
    tracing::warn!(
        sources = sources.len(),
        sources_left_out,
        daemon_sets = daemons.len(),
        daemon_sets_left_out = daemons_left_out,
        "searched for the node pools, nodes and daemon sets that a plan fails over"
    );
    let left_out = sources_left_out + daemons_left_out;
    let blamable = MAX_BLAMED.0.max((sources.len() + daemons.len()) * MAX_BLAMED.1 / 100);
    if left_out == 0 || (trials == Trials::Pods && left_out > blamable) {
        return None;
    }
    let keeps_pods = passes(planner, &all, &with, NodeUse::PodsOnly, &mut 1).await;
    let of_others = if keeps_pods { NodeUse::PodsOnly } else { NodeUse::None };
    for (sources, verdict) in [(&sources, &with.sources), (&daemons, &with.daemons)] {
        let rejected = verdict.culprits.iter().chain(&verdict.untried);
        quarantine_sources(ctx, rejected.map(|source| sources[*source].clone()), keeps_pods);
    }
    let mut rest = snapshot.of_pods(&(0..snapshot.problem.pods.len()).collect::<Vec<_>>(), &cache);
    with.restrict(&mut rest, of_others);
    Some(rest)
}

fn search(ctx: &Context, sources: &[Source], trials_left: usize) -> CulpritSearch {
    let quarantine = lock(&ctx.supply_quarantine);
    CulpritSearch::of_inputs(sources.len(), |source| quarantine.has_failed(&sources[source]), trials_left)
}

/// What a plan uses: indexes into NodePools and nodes, and into DaemonSets.
struct Accepted {
    sources: Verdict,
    daemons: Verdict,
}

impl Accepted {
    /// Removes what is not accepted. Of the other nodes remains `of_others`.
    fn restrict(&self, snapshot: &mut Snapshot, of_others: NodeUse) {
        let problem = &snapshot.problem;
        let flags = |verdict: &Verdict, count: usize| {
            let mut accepted = vec![false; count];
            verdict.accepted.iter().for_each(|source| accepted[*source] = true);
            accepted
        };
        let sources = flags(&self.sources, problem.pools.len() + problem.nodes.len());
        let daemons = flags(&self.daemons, problem.daemons.len());
        let (of_pools, of_nodes) = sources.split_at(problem.pools.len());
        let (mut of_pools, mut of_nodes, mut of_daemons) = (of_pools.iter(), of_nodes.iter(), daemons.iter());
        snapshot.restrict(
            |_| of_pools.next() == Some(&true),
            |_| if of_nodes.next() == Some(&true) { NodeUse::Whole } else { of_others },
        );
        snapshot.problem.daemons.retain(|_| of_daemons.next() == Some(&true));
    }
}

/// Whether a plan with what is accepted passes. Of the other nodes it has `of_others`.
async fn passes(
    planner: Planner,
    all: &Snapshot,
    with: &Accepted,
    of_others: NodeUse,
    trials_left: &mut usize,
) -> bool {
    *trials_left = trials_left.saturating_sub(1);
    let mut tried = all.of_pods(&(0..all.problem.pods.len()).collect::<Vec<_>>(), &all.column_cache);
    with.restrict(&mut tried, of_others);
    plan(planner, &Arc::new(tried)).await.is_some()
}

/// Leaves out and reports NodePools, nodes and DaemonSets that the planner panics over.
pub fn quarantine_sources(ctx: &Arc<Context>, sources: impl Iterator<Item = Source>, keeps_pods: bool) {
    let now = clock::now();
    let mut notes = Vec::new();
    {
        let state = ctx.cluster.read();
        let mut quarantine = lock(&ctx.supply_quarantine);
        quarantine.retain(|source| match source {
            Source::NodePool(name) => state.pools.contains_key(&**name),
            Source::Node(name) => state.nodes.contains_key(&**name) || state.claims.contains_key(&**name),
            Source::DaemonSet(key) => state.daemons.contains_key(&**key),
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
            let about = match &source {
                Source::NodePool(_) => pool.map(|pool| reference(&**pool)),
                Source::Node(_) => {
                    let claim = || state.claims.get(name).map(|claim| reference(&**claim));
                    state.nodes.get(name).map(|node| reference(&**node)).or_else(claim)
                }
                Source::DaemonSet(_) => {
                    state.daemons.get(name).zip(name.split_once('/')).map(|(record, (namespace, name))| {
                        ObjectReference {
                            api_version: Some("apps/v1".into()),
                            kind: Some("DaemonSet".into()),
                            namespace: Some(namespace.to_owned()),
                            name: Some(name.to_owned()),
                            uid: Some(record.uid.as_ref().to_owned()),
                            ..ObjectReference::default()
                        }
                    })
                }
            };
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
