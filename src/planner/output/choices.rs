//! The columns that a planned node may be launched as.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use stowage_api::Requirement;
use stowage_model::offering::InstanceType;

use crate::pack::substitutes::{can_hold, common_columns, load, max_price, substitutes};
use crate::state::plan_state::{PlanState, PurchasedNode};

/// Maximum instance types among a node's choices (Karpenter AWS reference 5.2).
pub(crate) const MAX_TYPES: usize = 60;

/// Columns that can hold a purchased node's pattern within limits and its maximum price, of at most [`MAX_TYPES`] instance types: the purchased column
/// first, then ascending by price. Types that `minValues` needs are kept first. `is_roomy`: no limit can be exceeded by any choice.
pub(crate) fn choices(state: &PlanState<'_, '_>, node: &PurchasedNode, is_roomy: bool) -> Vec<usize> {
    let column_sets = &*state.column_sets;
    let pool = column_sets.pool(node.column);
    let mut budget = state.budgets[pool].clone();
    budget.refund(column_sets.charge(node.column));
    let max_price = max_price(column_sets, node.column);
    let affords = |c: &usize| {
        max_price.is_none_or(|most| column_sets.columns[*c].paid <= most)
            && (is_roomy || budget.allows(column_sets.charge(*c)))
    };
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use serde_json::{Value, json};

    use crate::output::choices::{MAX_TYPES, choices};
    use crate::state::plan_state::PurchasedNode;
    use crate::test_support::World;
    use crate::test_support::plan_stages::{column, instance, pattern};

    /// The choices of an a1.x4 in z-b with one pod, as type and zone.
    fn offered(world: &World, is_roomy: bool) -> Vec<String> {
        let mut instance = instance(world);
        let mut state = instance.state(false);
        let node = PurchasedNode { column: column(&state, "a1.x4", "z-b"), pattern: pattern(&state, &[("p", 1)]) };
        state.purchase(node.clone(), 1);
        let text = |column: usize| {
            format!("{} {}", state.column_sets.instance_type(column).name, state.column_sets.columns[column].zone)
        };
        choices(&state, &node, is_roomy).into_iter().map(text).collect()
    }

    fn world(pool: Value, cpu: &str) -> World {
        let mut world = World::with_pools(&[("default", pool)]);
        world.pods("p", 1, &json!({}), cpu, "1Gi", &json!({}));
        world
    }

    #[test]
    fn the_purchased_column_is_first_and_the_others_ascend_by_price() {
        let found = offered(&world(json!({}), "3"), true);
        assert_eq!(found[..6], ["a1.x4 z-b", "a1.x4 z-a", "a1.x4 z-c", "c1.x4 z-a", "c1.x4 z-b", "c1.x4 z-c"]);
        assert_eq!(found.len(), 4 * 3 * 3 + 2 * 2, "three sizes of four families, and both of g1 in two zones");
    }

    #[test]
    fn choices_are_within_the_remaining_limit() {
        let found = offered(&world(json!({"limits": {"cpu": "4"}}), "1"), false);
        let types: BTreeSet<&str> = found.iter().filter_map(|choice| choice.split(' ').next()).collect();
        let within = ["a1.x2", "a1.x4", "c1.x2", "c1.x4", "g1.x4", "m1.x2", "m1.x4", "r1.x2", "r1.x4"];
        assert_eq!(types.into_iter().collect::<Vec<_>>(), within);
        assert_eq!(found.len(), 8 * 3 + 2, "in every zone; g1 is in two");
    }

    #[test]
    fn at_most_sixty_types_are_chosen_with_all_their_offerings() {
        let mut world = world(json!({}), "3");
        let pool = &mut world.problem.pools[0];
        let mut catalog = (*pool.catalog).clone();
        let model = catalog.instance_types.iter().find(|t| &*t.name == "a1.x4").unwrap().clone();
        for number in 0..70 {
            let mut another = (*model).clone();
            another.name = format!("a2.x{number}").into();
            // In z-c it costs more than the first offering of any other of these types.
            let last = another.offerings.iter_mut().filter(|offering| &*offering.zone == "z-c");
            last.for_each(|offering| offering.price.0 += 1000);
            catalog.instance_types.push(Arc::new(another));
        }
        pool.catalog = Arc::new(catalog);
        let found = offered(&world, true);
        let mut types: Vec<&str> = found.iter().filter_map(|choice| choice.split(' ').next()).collect();
        types.sort_unstable();
        types.dedup();
        assert_eq!((types.len(), found.len()), (MAX_TYPES, 3 * MAX_TYPES));
    }
}
