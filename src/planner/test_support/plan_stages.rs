//! A plan state for tests of single stages of the solver, and readable forms of its contents.

use stowage_model::offering::CapacityType;

use crate::columns::bitset::Bits;
use crate::columns::table::ColumnCache;
use crate::pricing::subproblem::Subproblem;
use crate::state::demand::pattern::Pattern;
use crate::state::feedback::Feedback;
use crate::state::plan_state::{PlanState, PurchasedNode};
use crate::state::solver_instance::SolverInstance;
use crate::test_support::World;

pub(crate) fn instance(world: &World) -> SolverInstance<'_> {
    SolverInstance::new(&world.problem, &ColumnCache::default(), &Feedback::default())
}

/// All column pools.
pub(crate) fn active(state: &PlanState<'_, '_>) -> Vec<bool> {
    vec![true; state.demand.column_pools.len()]
}

pub(crate) fn all_columns(state: &PlanState<'_, '_>) -> Bits {
    Bits::full(state.column_sets.columns.len())
}

/// All columns at the most preferred level.
pub(crate) fn subproblem(state: &mut PlanState<'_, '_>) -> Subproblem {
    let (all, active) = (all_columns(state), active(state));
    Subproblem::new(state, 0, &all, &active)
}

/// The on-demand column of an instance type in a zone.
pub(crate) fn column(state: &PlanState<'_, '_>, instance_type: &str, zone: &str) -> usize {
    let sets = &state.column_sets;
    let is_it = |column: &usize| {
        let of = &sets.columns[*column];
        let named = &*sets.instance_type(*column).name == instance_type && &*of.zone == zone;
        named && of.capacity_type == CapacityType::OnDemand
    };
    (0..sets.columns.len()).find(is_it).expect("the catalog has it")
}

fn name(state: &PlanState<'_, '_>, item: usize) -> String {
    let pod = state.demand.groups[state.demand.items[item].group].pods[0];
    let key = state.column_sets.problem.pods[pod].key.trim_start_matches("default/");
    key.rsplit_once('-').map_or(key, |(name, _)| name).to_owned()
}

/// The first item of the pods `name-0`, `name-1`, ...
pub(crate) fn item(state: &PlanState<'_, '_>, of: &str) -> usize {
    (0..state.demand.items.len()).find(|item| name(state, *item) == of).expect("there are such pods")
}

pub(crate) fn pattern(state: &PlanState<'_, '_>, of: &[(&str, usize)]) -> Pattern {
    of.iter().map(|(name, count)| (item(state, name), *count)).collect()
}

pub(crate) fn purchase(state: &mut PlanState<'_, '_>, instance_type: &str, zone: &str, of: &[(&str, usize)]) {
    let node = PurchasedNode { column: column(state, instance_type, zone), pattern: pattern(state, of) };
    state.purchase(node, 1);
}

/// A pattern as `p 3, q 1`.
pub(crate) fn described(state: &PlanState<'_, '_>, pattern: &[(usize, usize)]) -> String {
    let parts: Vec<String> = pattern.iter().map(|(item, count)| format!("{} {count}", name(state, *item))).collect();
    parts.join(", ")
}

/// Purchased nodes as `a1.x4 in z-a: p 3, q 1`, in order of purchase.
pub(crate) fn purchased(state: &PlanState<'_, '_>) -> Vec<String> {
    let text = |node: &PurchasedNode| {
        let instance_type = &state.column_sets.instance_type(node.column).name;
        let zone = &state.column_sets.columns[node.column].zone;
        format!("{instance_type} in {zone}: {}", described(state, &node.pattern))
    };
    state.purchased.iter().map(text).collect()
}

/// Placements on existing nodes as `node: p 3, q 1`.
pub(crate) fn placed(state: &PlanState<'_, '_>) -> Vec<String> {
    let text = |(node, pattern): &(usize, Pattern)| {
        format!("{}: {}", state.existing[*node].state.name, described(state, pattern))
    };
    state.placements.iter().map(text).collect()
}

/// Remaining pods by name, items without remaining pods left out.
pub(crate) fn remaining(state: &PlanState<'_, '_>) -> String {
    let items = state.demand.items.iter().enumerate().filter(|(_, item)| item.remaining > 0);
    described(state, &items.map(|(at, item)| (at, item.remaining)).collect::<Vec<_>>())
}
