//! Preempt: no pod is evicted for a pod that the filter would still deny afterwards.

use std::collections::BTreeMap;

use stowage_model::time::UnixMillis;

use crate::extender::filter::Judge;
use crate::extender::name::Name;
use crate::extender::view::View;
use crate::extender::wire::{MetaPod, MetaVictims, PreemptArgs, PreemptResult};

/// Keeps kube-scheduler's candidates that pass the filter, with their victims unchanged.
///
/// Its dry run ignores plans and holds. Dropped are: for a planned pod, every node but the planned node (every node until that node
/// exists); nodes being disrupted; and nodes whose room is reserved for other pods. Candidates without victims are dropped, too:
/// kube-scheduler treats them as an error of the whole attempt.
#[must_use]
pub fn preempt<'a>(view: &View, now: UnixMillis, args: PreemptArgs<'a>) -> PreemptResult<'a> {
    let PreemptArgs { pod, victims, meta_victims } = args;
    let candidates: BTreeMap<Name<'a>, MetaVictims<'a>> = meta_victims.unwrap_or_else(|| {
        victims
            .unwrap_or_default()
            .into_iter()
            .map(|(name, victims)| {
                let pods = victims.pods.unwrap_or_default();
                let pods = pods.into_iter().map(|pod| MetaPod { uid: Name(pod.metadata.uid) }).collect();
                (name, MetaVictims { pods: Some(pods), num_pdb_violations: victims.num_pdb_violations })
            })
            .collect()
    });
    let mut result = PreemptResult::default();
    let judged = !(view.is_stale(now) || pod.is_daemon() || !view.restrains(now));
    let names: Vec<Name<'a>> = candidates.keys().cloned().collect();
    let mut judge = judged.then(|| Judge::new(view, now, &pod, &names));
    for (name, victims) in candidates {
        if victims.pods.as_ref().is_none_or(Vec::is_empty) {
            continue;
        }
        match judge.as_mut().map(|judge| judge.verdict(name.as_str())) {
            None | Some(Ok(())) => {
                result.meta_victims.insert(name, victims);
            }
            Some(Err((denial, _))) => result.denied.count(denial),
        }
    }
    result
}
