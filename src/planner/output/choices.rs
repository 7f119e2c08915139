//! The columns that a planned node may be launched as.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use crate::api::Requirement;
use crate::model::offering::InstanceType;
use crate::planner::pack::substitutes::{can_hold, common_columns, load, substitutes};
use crate::planner::state::plan_state::{PlanState, PurchasedNode};

/// Maximum instance types among a node's choices (Karpenter AWS reference 5.2).
pub(crate) const MAX_TYPES: usize = 60;

/// Columns that can hold a purchased node's pattern within limits, of at most [`MAX_TYPES`] instance types: the purchased column
/// first, then ascending by price. Types that `minValues` needs are kept first. `is_roomy`: no limit can be exceeded by any choice.
pub(crate) fn choices(state: &PlanState<'_, '_>, node: &PurchasedNode, is_roomy: bool) -> Vec<usize> {
    let column_sets = &*state.column_sets;
    let pool = column_sets.pool(node.column);
    let mut budget = state.budgets[pool].clone();
    budget.refund(&column_sets.instance_type(node.column).capacity);
    let affords = |c: &usize| is_roomy || budget.allows(&column_sets.instance_type(*c).capacity);
    let mut others =
        substitutes(state, node.column, &node.pattern).filter(|c| *c != node.column && affords(c)).peekable();
    let type_of = |column: usize| Arc::as_ptr(column_sets.instance_type(column));
    let has_min_values = |r: &&Requirement| r.min_values.is_some();
    let min_values = column_sets.problem.pools[pool].requirements.iter().filter(has_min_values);
    let takes_all = min_values.clone().count() > 0;
    // Types in order of their cheapest offering, each by its first column.
    let mut seen = vec![type_of(node.column)];
    let (mut allowed, mut types) = (vec![node.column], vec![node.column]);
    let mut last = type_of(node.column);
    while let Some(column) = others.next_if(|c| takes_all || types.len() < MAX_TYPES || seen.contains(&type_of(*c))) {
        if type_of(column) != last && !seen.contains(&type_of(column)) {
            seen.push(type_of(column));
            types.push(column);
        }
        last = type_of(column);
        allowed.push(column);
    }
    if !takes_all {
        // The types are complete. Only their offerings that cost more than the first offering of a further type are missing.
        if let Some(next) = others.peek().map(|column| column_sets.rank[*column]) {
            let shapes: BTreeSet<usize> = allowed.iter().map(|c| column_sets.columns[*c].shape).collect();
            let offerings = shapes.into_iter().flat_map(|at| column_sets.shapes[at].first..column_sets.shapes[at].end);
            let (load, common) = (load(state, &node.pattern), common_columns(state, node.column, &node.pattern));
            let known = allowed.len();
            allowed.extend(offerings.filter(|c| {
                column_sets.rank[*c] > next
                    && *c != node.column
                    && can_hold(state, *c, &load, &common, node.column)
                    && affords(c)
            }));
            allowed[known..].sort_unstable_by_key(|column| column_sets.rank[*column]);
        }
        return allowed;
    }
    if is_roomy && types.len() <= MAX_TYPES {
        return allowed;
    }
    let mut kept: HashSet<*const InstanceType> = HashSet::new();
    for requirement in min_values {
        let least = usize::try_from(requirement.min_values.unwrap_or(0)).unwrap_or(0);
        let mut values: BTreeSet<&str> = BTreeSet::new();
        for column in &types {
            if values.len() >= least {
                break;
            }
            if let Some(value) = column_sets.label(*column, &requirement.key)
                && values.insert(value)
            {
                kept.insert(type_of(*column));
            }
        }
    }
    if !is_roomy {
        // Near a limit, types larger than minValues needs would take the limit from the other nodes.
        let mut most = column_sets.instance_type(node.column).capacity.clone();
        let needed = types.iter().filter(|column| kept.contains(&type_of(**column)));
        needed.for_each(|column| most.raise_to(&column_sets.instance_type(*column).capacity));
        types.retain(|column| column_sets.instance_type(*column).capacity.fits(&most));
    }
    for column in &types {
        if kept.len() >= MAX_TYPES {
            break;
        }
        kept.insert(type_of(*column));
    }
    allowed.retain(|column| kept.contains(&type_of(*column)));
    allowed
}
