//! Prioritize: the planned node, then best fit. A tie-breaker: kube-scheduler calls it only when several nodes pass the filter.

use std::collections::BTreeSet;

use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;

use crate::extender::filter::names_of;
use crate::extender::room::NodeEntry;
use crate::extender::view::{Standing, View};
use crate::extender::wire::{FilterArgs, HostPriority};

/// Score of the planned node; every other node gets less.
pub const MAX_SCORE: i64 = 10;

/// Scores the nodes in `args` for its pod: 10 for the planned node (or a node where it may take the hold of a displaced pod), otherwise
/// 0 to 9, higher the less remains free. 0 for nodes that are not in the view, and for all nodes when the view is stale.
#[must_use]
pub fn prioritize<'a>(view: &View, now: UnixMillis, args: FilterArgs<'a>) -> Vec<HostPriority<'a>> {
    let FilterArgs { pod, nodes, node_names } = args;
    let names = node_names.unwrap_or_else(|| names_of(nodes.as_ref()));
    if view.is_stale(now) {
        return names.into_iter().map(|host| HostPriority { host, score: 0 }).collect();
    }
    let key = pod.key();
    let requests = pod.requests();
    let standing = view.standing(now, &key);
    let own = view.own(&key);
    let slots = if standing == Standing::Free { view.slots(now, &pod, &requests, &names) } else { BTreeSet::new() };
    names
        .into_iter()
        .map(|host| {
            let name = host.as_str();
            let planned = standing == Standing::Planned(name) || slots.contains(name);
            let score = match view.node(name) {
                _ if planned => MAX_SCORE,
                Some(node) => tightness(node, now, own, pod.priority(), &requests),
                None => 0,
            };
            HostPriority { host, score }
        })
        .collect()
}

/// 9 for a node that the pod fills, 0 for a node that stays empty: 9 × (1 − the larger free share of CPU and memory).
fn tightness(node: &NodeEntry, now: UnixMillis, own: Option<&str>, priority: i32, requests: &Resources) -> i64 {
    let (leftover, _) = node.leftover(now, own, priority, None);
    let left = leftover.get();
    let ninths = |left: i64, request: i64, of: i64| -> i64 {
        if of <= 0 {
            return 0;
        }
        let remaining = i128::from(left.saturating_sub(request).clamp(0, of));
        // At most 9, since `remaining` is at most `of`.
        i64::try_from(remaining * i128::from(MAX_SCORE - 1) / i128::from(of)).unwrap_or(MAX_SCORE - 1)
    };
    let most = ninths(left.cpu.0, requests.cpu.0, node.allocatable.cpu.0).max(ninths(
        left.memory.0,
        requests.memory.0,
        node.allocatable.memory.0,
    ));
    MAX_SCORE - 1 - most
}
