//! Filter: reserves a planned node for the pods that it was purchased for.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;

use crate::extender::ExtenderPod;
use crate::extender::name::Name;
use crate::extender::view::{Standing, View};
use crate::extender::wire::{Answer, Denial, FilterArgs, FilterResult, NodeList};

/// Filters the nodes in `args` for its pod. Every name that passes was in the input; the order is the input's.
///
/// Nodes are denied as `FailedAndUnresolvableNodes`: preemption cannot free room that is reserved for a plan. kube-scheduler retries
/// the pod on the next cluster event either way.
#[must_use]
pub fn filter<'a>(view: &View, now: UnixMillis, args: FilterArgs<'a>) -> FilterResult<'a> {
    let FilterArgs { pod, nodes, node_names } = args;
    let answer = if view.is_stale(now) {
        Answer::Stale
    } else if pod.is_daemon() || !view.restrains(now) {
        Answer::Unrestrained
    } else {
        Answer::Judged
    };
    if answer != Answer::Judged {
        let names = node_names.unwrap_or_else(|| names_of(nodes.as_ref()));
        return FilterResult { nodes, node_names: names, answer, ..FilterResult::default() };
    }

    let names = node_names.unwrap_or_else(|| names_of(nodes.as_ref()));
    let mut judge = Judge::new(view, now, &pod, &names);
    let mut result = FilterResult { answer, node_names: Vec::with_capacity(names.len()), ..FilterResult::default() };
    // With whole nodes, items and names are parallel lists: an item without a name is filtered by the empty name.
    let keep: Option<Vec<bool>> = nodes.as_ref().map(|_| Vec::with_capacity(names.len()));
    let mut keep = keep;
    for name in names {
        let verdict = judge.verdict(name.as_str());
        if let Some(keep) = &mut keep {
            keep.push(verdict.is_ok());
        }
        match verdict {
            Ok(()) => result.node_names.push(name),
            Err((denial, reason)) => {
                result.denied.count(denial);
                result.failed_and_unresolvable.push((name, reason));
            }
        }
    }
    result.nodes = nodes.zip(keep).map(|(nodes, keep)| NodeList {
        metadata: nodes.metadata,
        items: nodes
            .items
            .map(|items| items.into_iter().zip(keep).filter_map(|(item, keep)| keep.then_some(item)).collect()),
    });
    result
}

/// Names of whole nodes, in order; empty where a node has no name.
pub(crate) fn names_of<'a>(nodes: Option<&NodeList>) -> Vec<Name<'a>> {
    let items = nodes.and_then(|nodes| nodes.items.as_deref()).unwrap_or_default();
    items
        .iter()
        .map(|item| {
            let name = item.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
            Name(Cow::Owned(name.to_owned()))
        })
        .collect()
}

/// Verdicts for one pod and many nodes; allocates per distinct reason, not per node.
pub(crate) struct Judge<'v, 'p> {
    view: &'v View,
    now: UnixMillis,
    pod: &'p ExtenderPod<'p>,
    key: String,
    /// The pod has a hold on some node.
    holds_own: bool,
    requests: Resources,
    tolerates_disruption: bool,
    standing: Standing<'v>,
    /// Candidates where this pod may take the hold of a displaced pod; when there is one, the pod passes there only.
    slots: BTreeSet<&'v str>,
    elsewhere: Option<Arc<str>>,
    disrupting: Option<Arc<str>>,
    reserved: BTreeMap<usize, Arc<str>>,
}

impl<'v, 'p> Judge<'v, 'p> {
    pub(crate) fn new(view: &'v View, now: UnixMillis, pod: &'p ExtenderPod<'p>, candidates: &[Name<'_>]) -> Self {
        let key = pod.key();
        let standing = view.standing(now, &key);
        let requests = pod.requests();
        let slots = match standing {
            Standing::Free => view.slots(now, pod, &requests, candidates),
            Standing::Waiting(_) | Standing::Planned(_) => BTreeSet::new(),
        };
        Self {
            view,
            now,
            pod,
            holds_own: view.own(&key).is_some(),
            key,
            requests,
            tolerates_disruption: pod.tolerates_disruption(),
            standing,
            slots,
            elsewhere: None,
            disrupting: None,
            reserved: BTreeMap::new(),
        }
    }

    pub(crate) fn verdict(&mut self, name: &str) -> Result<(), (Denial, Arc<str>)> {
        match self.standing {
            Standing::Waiting(claim) => {
                let reason = self
                    .elsewhere
                    .get_or_insert_with(|| format!("waiting for planned node of nodeclaim {claim}").into());
                return Err((Denial::WaitingForNode, Arc::clone(reason)));
            }
            Standing::Planned(node) if node == name => return Ok(()),
            Standing::Planned(node) => return Err(self.elsewhere(node)),
            Standing::Free => {}
        }
        if let Some(first) = self.slots.first().copied() {
            if self.slots.contains(name) {
                return Ok(());
            }
            return Err(self.elsewhere(first));
        }
        let Some(node) = self.view.restrained(name) else {
            return Ok(());
        };
        if node.disrupting && !self.tolerates_disruption {
            let reason = self.disrupting.get_or_insert_with(|| Arc::from("node is about to be disrupted"));
            return Err((Denial::Disrupting, Arc::clone(reason)));
        }
        let (leftover, binding) =
            node.leftover(self.now, self.holds_own.then_some(&*self.key), self.pod.priority(), None);
        if binding == 0 || self.requests.fits(leftover.get()) {
            return Ok(());
        }
        let reason = self.reserved.entry(binding).or_insert_with(|| {
            let pods = if binding == 1 { "pod" } else { "pods" };
            format!("room reserved for {binding} planned {pods}").into()
        });
        Err((Denial::RoomReserved, Arc::clone(reason)))
    }

    fn elsewhere(&mut self, node: &str) -> (Denial, Arc<str>) {
        let reason = self.elsewhere.get_or_insert_with(|| format!("planned on {node}").into());
        (Denial::PlannedElsewhere, Arc::clone(reason))
    }
}
