//! Statically provisioned volumes: assigns free volumes of single nodes to the claims of several pods that wait for them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use stowage_model::labels;
use stowage_model::pod_class::NodeTerm;
use stowage_model::requirement::ValueSet;

use crate::input::node::NodeState;
use crate::input::pod::PodEntry;
use crate::input::problem::Problem;
use crate::input::volumes::conjunction::both;
use crate::input::volumes::needs::Assigned;
use crate::input::volumes::objects::Volume;

/// Assigns a volume of its own to each claim that waits for a free volume of a node, where several pods have such claims. Greedy: in
/// the order of their keys, pods take for each claim the smallest volume that serves it on a node that admits the pod; all volumes of
/// a pod are reachable from one node. Volumes that several nodes can use are not assigned: the topology stage decides about them.
pub(crate) fn assign(problem: &Problem) -> Assigned {
    let volumes = &problem.volumes;
    let waiting = |pod: &PodEntry| -> Vec<(Arc<str>, Arc<str>)> {
        let class = |key: &Arc<str>| {
            let claim = volumes.claims.get(key.as_ref())?;
            let class = volumes.served_class(claim)?;
            let of_nodes = volumes.serving(claim, &class).all(|(_, volume)| is_of_nodes(volume));
            of_nodes.then_some(class)
        };
        pod.claims.iter().filter_map(|key| Some((Arc::clone(key), class(key)?))).collect()
    };
    let mut pods: Vec<_> = problem.pods.iter().filter(|pod| !pod.claims.is_empty()).collect();
    pods.retain(|pod| !waiting(pod).is_empty());
    let mut out = Assigned::new();
    if pods.len() < 2 {
        return out;
    }
    pods.sort_by(|a, b| a.key.cmp(&b.key));
    let hosts = hosts(problem);
    let mut taken: HashSet<&str> = HashSet::new();
    for pod in pods {
        let open: Vec<_> = waiting(pod).into_iter().filter(|(claim, _)| !out.contains_key(claim)).collect();
        let mut choices: Vec<Vec<(&str, &Volume)>> = Vec::new();
        for (claim, class) in &open {
            let serving = volumes.serving(&volumes.claims[claim.as_ref()], class);
            let mut left: Vec<(&str, &Volume)> = serving.map(|(name, volume)| (name.as_str(), volume)).collect();
            left.retain(|(_, volume)| within_reach(&hosts, pod, volume));
            // A pod that no node admits does not reduce the volumes for other pods.
            let reached = !left.is_empty();
            left.retain(|(name, _)| !taken.contains(name));
            if reached && left.is_empty() {
                out.insert(Arc::clone(claim), None);
            }
            left.sort_by_key(|(name, volume)| (volume.free.as_ref().map(|free| free.bytes), *name));
            choices.push(left);
        }
        // The volume of the first claim determines where the others must be.
        let together = choices.first().into_iter().flatten().find_map(|first| colocated(*first, &choices));
        for ((claim, _), volume) in open.into_iter().zip(together.into_iter().flatten()) {
            taken.insert(volume);
            out.insert(claim, Some(Arc::from(volume)));
        }
    }
    out
}

/// A distinct volume of each list, all of them usable from one node with `first`.
fn colocated<'v>(first: (&'v str, &Volume), choices: &[Vec<(&'v str, &Volume)>]) -> Option<Vec<&'v str>> {
    let (mut names, mut terms) = (vec![first.0], first.1.terms.clone());
    for list in &choices[1..] {
        let (name, joined) = list.iter().filter(|(name, _)| !names.contains(name)).find_map(|(name, volume)| {
            let joined = both(&terms, &volume.terms);
            (!joined.is_empty() || volume.terms.is_empty() && terms.is_empty()).then_some((*name, joined))
        })?;
        names.push(name);
        terms = joined;
    }
    Some(names)
}

/// Nodes by host name and by name.
type Hosts<'p> = HashMap<&'p str, Vec<&'p NodeState>>;

fn hosts(problem: &Problem) -> Hosts<'_> {
    let mut out = Hosts::new();
    for node in problem.nodes.iter().filter(|node| node.schedulable) {
        let host = node.label(labels::HOSTNAME).filter(|host| **host != *node.name);
        for name in host.into_iter().chain([&*node.name]) {
            out.entry(name).or_default().push(node);
        }
    }
    out
}

/// The host names in a term.
fn hosts_of(term: &NodeTerm) -> Option<impl Iterator<Item = &Arc<str>>> {
    term.labels.get(labels::HOSTNAME).or(term.name.as_ref()).and_then(ValueSet::finite)
}

/// Whether the terms of a volume restrict it to named nodes.
fn is_of_nodes(volume: &Volume) -> bool {
    !volume.terms.is_empty() && volume.terms.iter().all(|term| hosts_of(term).is_some())
}

/// Whether a node of the volume has room for the pod.
fn within_reach(hosts: &Hosts<'_>, pod: &PodEntry, volume: &Volume) -> bool {
    let takes = |node: &NodeState| {
        let mut room = node.allocatable.clone();
        room.sub(node.pods.requests());
        room.sub(&node.daemon_reserve);
        pod.class.requests.fits(&room) && node.admits(&pod.class) && node.satisfies(&volume.terms)
    };
    let reaches = |term: &NodeTerm| {
        hosts_of(term).is_some_and(|mut names| {
            names.any(|name| hosts.get(name.as_ref()).is_some_and(|nodes| nodes.iter().any(|node| takes(node))))
        })
    };
    volume.terms.iter().any(reaches)
}
