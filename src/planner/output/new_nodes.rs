//! From purchased nodes to planned nodes: their choices, pods, requests and requirements.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use stowage_api::Requirement;
use stowage_model::resources::Resources;
use stowage_model::units::MicroUsd;

use crate::columns::sets::ColumnSets;
use crate::columns::table::Charge;
use crate::output::choices::choices;
use crate::output::plan::{Choice, PlannedNode};
use crate::output::pod_cursor::PodCursor;
use crate::pack::min_values::{is_strict, nameable_choices, satisfies_min_values};
use crate::pack::nameable::CHOSEN_AT_LAUNCH;
use crate::pack::substitutes::{load, max_price};
use crate::state::plan_state::PlanState;

/// What nodes with the same choices share.
struct ChoiceSet {
    choices: Arc<[Choice]>,
    /// The most that a choice counts for each limit.
    most: MaxCharge,
    /// Requirements on offering labels that all choices satisfy.
    label_requirements: Vec<Requirement>,
    /// Requests that the daemons of every choice have at least (Karpenter core reference 3.10).
    daemon_requests: Vec<i64>,
}

/// Componentwise maximum of charges.
#[derive(Clone, Debug, Default)]
struct MaxCharge {
    capacity: Resources,
    price: i64,
}

impl MaxCharge {
    fn raise_to(&mut self, charge: Charge<'_>) {
        self.capacity.raise_to(charge.capacity);
        self.price = self.price.max(charge.price);
    }

    fn charge(&self) -> Charge<'_> {
        Charge { capacity: &self.capacity, price: self.price }
    }
}

/// The planned nodes, in order of purchase. A node whose `minValues` no longer hold, because the nodes before it used up the limits,
/// is not purchased: its pods return to the demand.
pub(crate) fn new_nodes(state: &mut PlanState<'_, '_>, pods: &mut PodCursor) -> Vec<PlannedNode> {
    let largest = largest_charges(state.column_sets);
    let purchased = std::mem::take(&mut state.purchased);
    let mut shared: HashMap<Vec<usize>, ChoiceSet> = HashMap::new();
    // Nodes of one column and load with pods of the same column pools have the same choices.
    let mut known: HashMap<(usize, Vec<i64>, Vec<usize>), Vec<usize>> = HashMap::new();
    let mut nodes: Vec<PlannedNode> = Vec::with_capacity(purchased.len());
    for node in &purchased {
        let pool = state.column_sets.pool(node.column);
        let limited = state.column_sets.problem.pools[pool].limits.is_some();
        // Near a limit, the choices of a node depend on the nodes before it.
        let is_roomy = !limited || state.budgets[pool].allows(largest[pool].charge());
        let mut requests = load(state, &node.pattern);
        let named = |state: &PlanState<'_, '_>| nameable_choices(state, pool, &choices(state, node, is_roomy));
        let columns = if is_roomy {
            let mut column_pools: Vec<usize> =
                node.pattern.iter().map(|(item, _)| state.demand.items[*item].column_pool).collect();
            column_pools.sort_unstable();
            column_pools.dedup();
            let key = (node.column, requests.clone(), column_pools);
            known.entry(key).or_insert_with(|| named(state)).clone()
        } else {
            named(state)
        };
        if is_strict(state, pool) && !satisfies_min_values(state, pool, &columns) {
            state.refund(node.column);
            state.demand.restore(&node.pattern);
            continue;
        }
        if !shared.contains_key(&columns) {
            shared.insert(columns.clone(), choice_set(state.column_sets, &columns));
        }
        let set = &shared[&columns];
        // Limits must hold whichever choice is launched, so the largest choice is spent.
        if limited {
            state.refund(node.column);
            state.budgets[pool].spend(set.most.charge(), 1);
        }
        for (sum, more) in requests.iter_mut().zip(&set.daemon_requests) {
            *sum += more;
        }
        let pinned = pinned_labels(state.column_sets, node.column);
        nodes.push(PlannedNode {
            pool,
            choices: Arc::clone(&set.choices),
            max_price: max_price(state.column_sets, node.column).map(MicroUsd),
            pods: pods.take_pattern(state, &node.pattern),
            requests: state.column_sets.dims.sparse(&requests),
            requirements: pinned.chain(set.label_requirements.iter().cloned()).collect(),
        });
    }
    nodes
}

/// The most that a node of each NodePool can count for each limit.
fn largest_charges(column_sets: &ColumnSets<'_>) -> Vec<MaxCharge> {
    let mut largest = vec![MaxCharge::default(); column_sets.problem.pools.len()];
    for shape in &column_sets.shapes {
        let largest = &mut largest[column_sets.pool(shape.first)];
        (shape.first..shape.end).for_each(|column| largest.price = largest.price.max(column_sets.columns[column].paid));
        largest.capacity.raise_to(&shape.instance_type.capacity);
    }
    largest
}

/// `columns` is not empty.
fn choice_set(column_sets: &ColumnSets<'_>, columns: &[usize]) -> ChoiceSet {
    let mut most = MaxCharge::default();
    for column in columns {
        most.raise_to(column_sets.charge(*column));
    }
    let least = |dim: usize| columns.iter().map(|column| column_sets.overhead(*column)[dim]).min();
    ChoiceSet {
        choices: columns.iter().map(|column| choice(column_sets, *column)).collect(),
        most,
        label_requirements: label_requirements(column_sets, columns),
        daemon_requests: (0..column_sets.dims.len()).map(|dim| least(dim).unwrap_or(0)).collect(),
    }
}

fn choice(column_sets: &ColumnSets<'_>, column: usize) -> Choice {
    let instance_type = Arc::clone(column_sets.instance_type(column));
    let column = &column_sets.columns[column];
    Choice {
        instance_type,
        zone: Arc::clone(&column.zone),
        capacity_type: column.capacity_type,
        price: MicroUsd(column.paid),
    }
}

/// Requirements on the labels of offerings that a launch selects by: the values of the choices, where all choices have a value and
/// the same types are also offered with other values.
fn label_requirements(column_sets: &ColumnSets<'_>, columns: &[usize]) -> Vec<Requirement> {
    let requirement = |key: &&'static str| {
        let value = |column: usize| column_sets.columns[column].labels.get(*key).map(String::as_str);
        let chosen: Option<BTreeSet<&str>> = columns.iter().map(|column| value(*column)).collect();
        let chosen = chosen?;
        let shapes: BTreeSet<usize> = columns.iter().map(|column| column_sets.columns[*column].shape).collect();
        let mut offered =
            shapes.iter().flat_map(|shape| column_sets.shapes[*shape].first..column_sets.shapes[*shape].end);
        let narrower = offered.any(|column| value(column).is_none_or(|value| !chosen.contains(value)));
        narrower.then(|| is_in(key, chosen.into_iter().map(str::to_owned).collect()))
    };
    CHOSEN_AT_LAUNCH.iter().filter_map(requirement).collect()
}

/// The labels that the column's variant fixes for the pods of the node.
fn pinned_labels(column_sets: &ColumnSets<'_>, column: usize) -> impl Iterator<Item = Requirement> {
    column_sets.variant(column).pinned.iter().map(|(key, value)| is_in(key, vec![value.clone()]))
}

fn is_in(key: &str, values: Vec<String>) -> Requirement {
    Requirement { key: key.to_owned(), operator: "In".to_owned(), values, min_values: None }
}
