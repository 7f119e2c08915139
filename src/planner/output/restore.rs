//! Maps the plan of a problem with resolved volumes, or with fewer NodePools, back to the problem that was given.

use stowage_model::resources::attached_by;

use crate::columns::relevant_pools::Reduced;
use crate::input::volumes::resolve_volumes::Resolved;
use crate::output::plan::{Plan, Unschedulable};

/// The plan with the pod indexes of the given problem, without attachment resources, and with the pods that the resolution of
/// volumes refused.
pub(crate) fn restore(mut plan: Plan, resolved: Resolved) -> Plan {
    let original = |pods: &mut Vec<usize>| pods.iter_mut().for_each(|pod| *pod = resolved.pods[*pod]);
    for node in &mut plan.new_nodes {
        original(&mut node.pods);
        node.requests.extended.retain(|name, _| attached_by(name).is_none());
    }
    plan.placements.iter_mut().for_each(|placement| original(&mut placement.pods));
    plan.unschedulable.iter_mut().for_each(|unschedulable| unschedulable.pod = resolved.pods[unschedulable.pod]);
    let refused = resolved.refused.into_iter().map(|(pod, why)| Unschedulable { pod, reason: why.to_string() });
    plan.unschedulable.extend(refused);
    plan.unschedulable.sort_by_key(|unschedulable| unschedulable.pod);
    plan
}

/// The plan with the indexes of the given NodePools. The reasons why pods are unschedulable say that there are others.
pub(crate) fn restore_pools(mut plan: Plan, reduced: &Reduced) -> Plan {
    for node in &mut plan.new_nodes {
        node.pool = reduced.pools[node.pool];
    }
    for pod in plan.unschedulable.iter_mut().filter(|pod| pod.reason.contains("NodePool")) {
        pod.reason.push_str("; other NodePools are like one of these, or not for any pod of this plan");
    }
    plan
}
