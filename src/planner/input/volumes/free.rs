//! Volumes that nothing makes: which of the free ones serve a claim, as the volume controller and kube-scheduler match them,
//! and one volume for each claim where several pods wait for some.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::model::labels;
use crate::model::pod_class::NodeTerm;
use crate::model::requirement::ValueSet;
use crate::planner::input::node::NodeState;
use crate::planner::input::pod::PodEntry;
use crate::planner::input::problem::Problem;
use crate::planner::input::volumes::conjunction::both;
use crate::planner::input::volumes::needs::Assigned;
use crate::planner::input::volumes::objects::Volume;

/// Gives each claim that waits for a free volume of a node one of its own, where several pods have such claims. Pods in the order
/// of their keys take, for each claim, the smallest volume that serves it on a node that takes the pod, those of one pod in one
/// place. Volumes that are for more than a node stay open to all: which of them serve whom is settled with the zones.
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
            // A pod that no node takes has no say in it.
            let reached = !left.is_empty();
            left.retain(|(name, _)| !taken.contains(name));
            if reached && left.is_empty() {
                out.insert(Arc::clone(claim), None);
            }
            left.sort_by_key(|(name, volume)| (volume.free.as_ref().map(|free| free.bytes), *name));
            choices.push(left);
        }
        // The first claim's volume says where the others are to be.
        let together = choices.first().into_iter().flatten().find_map(|first| beside(*first, &choices));
        for ((claim, _), volume) in open.into_iter().zip(together.into_iter().flatten()) {
            taken.insert(volume);
            out.insert(claim, Some(Arc::from(volume)));
        }
    }
    out
}

/// A volume of each list, no two of them the same, that can be where `first` is.
fn beside<'v>(first: (&'v str, &Volume), choices: &[Vec<(&'v str, &Volume)>]) -> Option<Vec<&'v str>> {
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

/// The hosts that a term names.
fn hosts_of(term: &NodeTerm) -> Option<impl Iterator<Item = &Arc<str>>> {
    term.labels.get(labels::HOSTNAME).or(term.name.as_ref()).and_then(ValueSet::finite)
}

/// Whether a volume is only for nodes that its terms name.
fn is_of_nodes(volume: &Volume) -> bool {
    !volume.terms.is_empty() && volume.terms.iter().all(|term| hosts_of(term).is_some())
}

/// Whether a node that a volume is of has room for a pod.
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
