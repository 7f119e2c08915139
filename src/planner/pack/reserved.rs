//! Capacity reservations with a count: paid for already, so they are filled before anything is purchased.
//!
//! Their columns are in no preference level: an almost free column with a limited count would make the dual prices worthless.

use std::collections::HashMap;

use stowage_model::labels;

use crate::columns::bitset::Bits;
use crate::columns::dims::{dot, float};
use crate::columns::sets::ColumnSets;
use crate::groups::group::usable;
use crate::pack::min_values::min_values_hold;
use crate::state::demand::pattern::{Bin, Pattern};
use crate::state::plan_state::{PlanState, PurchasedNode};

/// Remaining instances of each reservation. NodePools that may use the same reservation share it, and so do partitions.
pub(crate) struct Reservations {
    /// Where the counts of a reservation's columns differ, the lowest.
    remaining: Vec<i64>,
    /// Columns, and the index in `remaining` of the reservation of each.
    columns: Vec<(usize, usize)>,
}

impl Reservations {
    pub fn new(column_sets: &ColumnSets<'_>) -> Self {
        let mut out = Self { remaining: Vec::new(), columns: Vec::new() };
        let mut ids: HashMap<(&str, &str, Option<&str>), usize> = HashMap::new();
        for (at, column) in column_sets.columns.iter().enumerate() {
            let Some(count) = column.left else { continue };
            let id = column.labels.get(labels::CAPACITY_RESERVATION_ID).map(String::as_str);
            let identity = (&*column_sets.instance_type(at).name, &*column.zone, id);
            let reservation = *ids.entry(identity).or_insert_with(|| {
                out.remaining.push(count);
                out.remaining.len() - 1
            });
            out.remaining[reservation] = out.remaining[reservation].min(count);
            out.columns.push((at, reservation));
        }
        out
    }
}

/// Best fit over the reservations of a tier: repeatedly fills the reservation of which the remaining demand uses the largest share
/// (by reference prices), with as many copies as the same pattern fills. `active` is by column pool.
pub(crate) fn fill_reservations(
    state: &mut PlanState<'_, '_>,
    reservations: &mut Reservations,
    tier: &Bits,
    active: &[bool],
) {
    let columns: Vec<(usize, usize)> =
        reservations.columns.iter().copied().filter(|(column, _)| tier.contains(*column)).collect();
    if columns.is_empty() {
        return;
    }
    let allowed: Vec<Option<Bits>> =
        active.iter().enumerate().map(|(pool, active)| active.then(|| reservable(state, pool))).collect();
    while !state.demand.is_empty() {
        let mut best: Option<(f64, usize, PurchasedNode)> = None;
        for (column, reservation) in columns.iter().copied() {
            if reservations.remaining[reservation] <= 0 || !state.affords(column) {
                continue;
            }
            let Some(pattern) = reserved_pattern(state, column, &allowed) else { continue };
            let prices = &state.reference_prices;
            let used: f64 = pattern.iter().map(|(item, n)| dot(state.demand.need(*item), prices) * float(*n)).sum();
            let share = used / dot(state.column_sets.room(column), prices).max(1.0);
            if best.as_ref().is_none_or(|(have, ..)| share > *have) {
                best = Some((share, reservation, PurchasedNode { column, pattern }));
            }
        }
        let Some((_, reservation, node)) = best else { return };
        let remaining = &mut reservations.remaining[reservation];
        let max = state.demand.copies_of(&node.pattern).min(usize::try_from(*remaining).unwrap_or(0));
        let copies = state.affordable_copies(node.column, max).max(1);
        *remaining -= i64::try_from(copies).unwrap_or(i64::MAX);
        state.purchase(node, copies);
    }
}

fn reserved_pattern(state: &mut PlanState<'_, '_>, column: usize, allowed: &[Option<Bits>]) -> Option<Pattern> {
    let buckets = state.demand.open_buckets(|pool| allowed[pool].as_ref().is_some_and(|bits| bits.contains(column)));
    if buckets.is_empty() {
        return None;
    }
    let host = state.daemon_host(column).clone();
    let bin = Bin { room: state.column_sets.room(column), host: &host, pattern: &[] };
    let pattern = state.demand.fill(&bin, &state.reference_prices, &buckets, None, &[], 0);
    (!pattern.is_empty() && min_values_hold(state, column, &pattern)).then_some(pattern)
}

/// Columns that the requirements and assigned domains of a column pool allow, reservations included.
pub(crate) fn reservable(state: &mut PlanState<'_, '_>, column_pool: usize) -> Bits {
    let pool = &state.demand.column_pools[column_pool];
    let mut bits = usable(state.column_sets, &state.demand.groups[pool.sample]);
    for (key, domain) in &pool.pins {
        bits.and(&state.topology.keys[*key].columns[*domain]);
    }
    bits
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};
    use stowage_model::offering::CapacityType;
    use stowage_model::units::MicroUsd;

    use crate::pack::reserved::{Reservations, fill_reservations};
    use crate::test_support::World;
    use crate::test_support::plan_stages::{active, all_columns, instance, purchased, remaining};

    /// Reservations of the given types and counts in z-b, pods of 1 CPU, and what the stage purchases.
    fn filled(reserved: &[(&str, i64)], pool: Value, pods: usize) -> (Vec<String>, String) {
        let mut world = World::with_pools(&[("default", pool)]);
        let pool = &mut world.problem.pools[0];
        pool.requirements.retain(|r| r.key != "karpenter.sh/capacity-type");
        let mut catalog = (*pool.catalog).clone();
        for (name, count) in reserved {
            let instance_type = catalog.instance_types.iter_mut().find(|t| &*t.name == *name).unwrap();
            let mut changed = (**instance_type).clone();
            let mut offering = changed.offerings.iter().find(|o| &*o.zone == "z-b").unwrap().clone();
            offering.capacity_type = CapacityType::Reserved;
            (offering.price, offering.left) = (MicroUsd(0), Some(*count));
            changed.offerings.push(offering);
            *instance_type = Arc::new(changed);
        }
        pool.catalog = Arc::new(catalog);
        world.pods("p", pods, &json!({}), "1", "1Gi", &json!({}));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        let mut reservations = Reservations::new(state.column_sets);
        let (all, active) = (all_columns(&state), active(&state));
        fill_reservations(&mut state, &mut reservations, &all, &active);
        (purchased(&state), remaining(&state))
    }

    #[test]
    fn a_reservation_is_used_up_to_its_count() {
        let full = "a1.x4 in z-b: p 4".to_owned();
        assert_eq!(filled(&[("a1.x4", 2)], json!({}), 10), (vec![full.clone(), full], "p 2".to_owned()));
        assert_eq!(filled(&[], json!({}), 10), (vec![], "p 10".to_owned()));
        assert_eq!(filled(&[("a1.x4", 0)], json!({}), 10), (vec![], "p 10".to_owned()));
    }

    #[test]
    fn the_reservation_that_the_demand_fills_best_comes_first() {
        let reserved = [("a1.x16", 1), ("a1.x4", 1)];
        let (nodes, _) = filled(&reserved, json!({}), 5);
        assert_eq!(nodes, ["a1.x4 in z-b: p 4", "a1.x16 in z-b: p 1"]);
    }

    #[test]
    fn limits_hold_for_reservations_too() {
        let (nodes, left) = filled(&[("a1.x4", 3)], json!({"limits": {"cpu": "4"}}), 8);
        assert_eq!((nodes.len(), left.as_str()), (1, "p 4"));
    }
}
