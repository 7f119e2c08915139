//! What a NodeClaim can say of a node's choices. It names instance types, zones and capacity types, and any combination of
//! them that is offered may be launched: choices are narrowed until each such combination is one of them.

use std::collections::HashMap;

use crate::model::labels;
use crate::planner::columns::bitset::Bits;
use crate::planner::columns::sets::ColumnSets;
use crate::planner::columns::table::Column;

/// Labels of offerings, beside zone and capacity type, that a launch chooses by.
pub(crate) const CHOSEN_AT_LAUNCH: [&str; 2] = [labels::PLACEMENT_GROUP_PARTITION, labels::CAPACITY_RESERVATION_ID];

/// What a claim tells columns apart by: type, zone, capacity type, and labels of which all choices have a value.
const AXES: usize = 3 + CHOSEN_AT_LAUNCH.len();

/// Where a column is on each axis.
type At = [usize; AXES];

/// The order in which choices are tried; the first one always comes first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// As they are: cheapest first.
    Price,
    /// Other types before other zones and capacity types.
    Types,
    /// Other zones and capacity types before other types.
    Zones,
}

/// Those of `columns` that a claim can name without naming anything else that is offered: the first of them, and of the
/// others, in their `order`, each that brings no combination with it that is not among `columns`. All of them, mostly.
pub(crate) fn nameable(column_sets: &ColumnSets<'_>, columns: &[usize], order: Order) -> Vec<usize> {
    let mut chosen = Bits::empty(column_sets.columns.len());
    for column in columns {
        chosen.insert(*column);
    }
    let mut shapes: Vec<usize> = columns.iter().map(|column| column_sets.columns[*column].shape).collect();
    shapes.sort_unstable();
    shapes.dedup();
    let (mut zones, mut capacity_types) = (Vec::new(), Vec::new());
    for column in columns.iter().map(|column| &column_sets.columns[*column]) {
        if !zones.contains(&&column.zone) {
            zones.push(&column.zone);
        }
        if !capacity_types.contains(&column.capacity_type) {
            capacity_types.push(column.capacity_type);
        }
    }
    let within = |column: &Column| zones.contains(&&column.zone) && capacity_types.contains(&column.capacity_type);
    let mut others: Vec<usize> = Vec::new();
    for shape in shapes {
        let offerings = || column_sets.shapes[shape].first..column_sets.shapes[shape].end;
        // A reservation that is counted is left out of plans for its count alone: the pods may use it where they may use
        // the type otherwise.
        let beside = |column: usize| {
            let zone = &column_sets.columns[column].zone;
            offerings().any(|other| chosen.contains(other) && column_sets.columns[other].zone == *zone)
        };
        let missing = offerings().filter(|column| !chosen.contains(*column) && within(&column_sets.columns[*column]));
        others.extend(missing.filter(|column| column_sets.columns[*column].left.is_none() || !beside(*column)));
    }
    if others.is_empty() {
        return columns.to_vec();
    }
    let mut axes = Axes::of(column_sets, columns);
    let all: Vec<At> = columns.iter().map(|column| axes.at(column_sets, *column)).collect();
    let first = all[0];
    let holes: Vec<At> =
        others.iter().map(|column| axes.at(column_sets, *column)).filter(|hole| *hole != first).collect();
    let mut named: Vec<Vec<bool>> = axes.values.iter().map(|values| vec![false; values.len()]).collect();
    let name = |named: &mut Vec<Vec<bool>>, at: &At| named.iter_mut().zip(at).for_each(|(axis, at)| axis[*at] = true);
    name(&mut named, &first);
    let mut tried: Vec<&At> = all.iter().collect();
    match order {
        Order::Price => {}
        Order::Types => tried.sort_by_key(|at| at[1..] != first[1..]),
        Order::Zones => tried.sort_by_key(|at| at[0] != first[0]),
    }
    for at in tried {
        let covered = |hole: &At| (0..AXES).all(|axis| named[axis][hole[axis]] || at[axis] == hole[axis]);
        let new = (0..AXES).any(|axis| !named[axis][at[axis]]);
        if new && !holes.iter().any(covered) {
            name(&mut named, at);
        }
    }
    let kept = |at: &At| (0..AXES).all(|axis| named[axis][at[axis]]);
    columns.iter().zip(&all).filter(|(_, at)| kept(at)).map(|(column, _)| *column).collect()
}

/// The values of each axis, numbered.
struct Axes<'u> {
    values: [HashMap<&'u str, usize>; AXES],
    /// Whether all choices have a value of the label; where some have none, a claim can't name any.
    told: [bool; CHOSEN_AT_LAUNCH.len()],
}

impl<'u> Axes<'u> {
    fn of(column_sets: &ColumnSets<'_>, columns: &[usize]) -> Self {
        let told = |key: &str| columns.iter().all(|column| column_sets.columns[*column].labels.contains_key(key));
        Self { values: Default::default(), told: CHOSEN_AT_LAUNCH.map(told) }
    }

    fn at(&mut self, column_sets: &'u ColumnSets<'_>, column: usize) -> At {
        let of = &column_sets.columns[column];
        let value = |axis: usize| match axis {
            0 => &*column_sets.instance_type(column).name,
            1 => &*of.zone,
            2 => of.capacity_type.as_str(),
            label => match of.labels.get(CHOSEN_AT_LAUNCH[label - 3]).filter(|_| self.told[label - 3]) {
                Some(value) => value,
                None => "",
            },
        };
        let keys: [&'u str; AXES] = std::array::from_fn(value);
        std::array::from_fn(|axis| {
            let next = self.values[axis].len();
            *self.values[axis].entry(keys[axis]).or_insert(next)
        })
    }
}
