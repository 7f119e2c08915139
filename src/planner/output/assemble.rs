//! From the final plan state to the plan: pods by index, sorted nodes, and a reason for each unschedulable pod.

use stowage_model::units::MicroUsd;

use crate::output::explain::Explainer;
use crate::output::new_nodes::new_nodes;
use crate::output::plan::{ExistingNodePlacement, Plan, Unschedulable};
use crate::output::pod_cursor::{PodCursor, Turn};
use crate::state::plan_state::PlanState;

/// Reason for pods that a rehearsal left out.
const UNBINDABLE: &str = "kube-scheduler may bind the other pods of this plan in an order that leaves no domain for it, by topology spread or pod \
                          affinity: it is planned again when they are bound";

/// The plan. Every pod is in exactly one of its three lists. `lower_bound` is in micro-USD per hour, up to the precision of the LP; `turns` are those
/// of [`PodCursor::new`].
pub(crate) fn assemble(state: &mut PlanState<'_, '_>, lower_bound: Option<f64>, turns: &[Turn]) -> Plan {
    let mut pods = PodCursor::new(state, turns);
    let mut plan = Plan { placements: placements(state, &mut pods), ..Plan::default() };
    plan.new_nodes = new_nodes(state, &mut pods);
    plan.cost = MicroUsd(plan.new_nodes.iter().filter_map(|n| n.choices.first()).map(|c| c.price.0).sum());
    plan.unschedulable = unschedulable(state, &mut pods);
    if let Some(bound) = lower_bound {
        plan.raise_bound(bound);
    }
    plan
}

/// Placements on existing nodes, one per node, in order of the problem's nodes.
fn placements(state: &mut PlanState<'_, '_>, cursor: &mut PodCursor) -> Vec<ExistingNodePlacement> {
    let mut out: Vec<ExistingNodePlacement> = Vec::new();
    for (node, pattern) in std::mem::take(&mut state.placements) {
        let pods = cursor.take_pattern(state, &pattern);
        out.push(ExistingNodePlacement { node: state.existing[node].index, pods });
    }
    out.sort_by_key(|placement| placement.node);
    out.dedup_by(|later, earlier| {
        let same = later.node == earlier.node;
        if same {
            earlier.pods.append(&mut later.pods);
            earlier.pods.sort_unstable();
        }
        same
    });
    out
}

/// Pods that the topology assignment refused, and the pods of the remaining demand.
fn unschedulable(state: &mut PlanState<'_, '_>, cursor: &mut PodCursor) -> Vec<Unschedulable> {
    if state.demand.is_empty() && state.assignments.iter().all(|assignment| assignment.refused.is_none()) {
        return Vec::new();
    }
    let reasons = reasons(state);
    let mut reasons = reasons.iter();
    let mut out: Vec<Unschedulable> = Vec::new();
    let mut next = vec![0; state.demand.groups.len()];
    let mut refuse = |pods: &[usize], reason: Option<&String>| {
        let reason = |pod: &usize| Unschedulable { pod: *pod, reason: reason.cloned().unwrap_or_default() };
        out.extend(pods.iter().map(reason));
    };
    for assignment in state.assignments {
        let first = next[assignment.group];
        next[assignment.group] += assignment.count;
        if assignment.refused.is_some() {
            refuse(cursor.of_group(assignment.group, first, assignment.count), reasons.next());
        }
    }
    for (at, item) in state.demand.items.iter().enumerate().filter(|(_, item)| item.remaining > 0) {
        refuse(cursor.take(state, at, item.remaining), reasons.next());
    }
    out.sort_by_key(|unschedulable| unschedulable.pod);
    out
}

/// Reasons of the refused assignments, then of the remaining items, in their order.
fn reasons(state: &mut PlanState<'_, '_>) -> Vec<String> {
    let demand = &state.demand;
    let mut explainer = Explainer::new(state.column_sets, state.topology, &state.budgets);
    let mut out = Vec::new();
    for assignment in state.assignments {
        if let Some(refused) = &assignment.refused {
            // That no node can be created anywhere is the more useful reason, so it is given as well.
            let no_node = explainer.explain(&demand.groups[assignment.group], &assignment.pins);
            out.push(format!("{refused}; {no_node}"));
        }
    }
    for (at, item) in demand.items.iter().enumerate().filter(|(_, item)| item.remaining > 0) {
        out.push(if state.unbindable.contains(&at) {
            UNBINDABLE.to_owned()
        } else {
            explainer.explain(&demand.groups[item.group], &demand.column_pools[item.column_pool].pins)
        });
    }
    out
}
