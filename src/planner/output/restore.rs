//! Maps the plan of a problem with resolved volumes back to the problem that was given.

use crate::model::resources::attached_by;
use crate::planner::input::volumes::resolve::Resolved;
use crate::planner::output::plan::{Plan, Unschedulable};

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
