//! The choices of a node that a NodeClaim can name. A NodeClaim lists instance types, zones and capacity types, and any offered
//! combination of them may be launched, so choices are reduced until every such combination is a choice.

use std::collections::HashMap;

use stowage_model::labels;

use crate::columns::bitset::Bits;
use crate::columns::sets::ColumnSets;
use crate::columns::table::Column;
use crate::pack::substitutes::max_price;

/// Labels of offerings that a launch selects by, besides zone and capacity type.
pub(crate) const CHOSEN_AT_LAUNCH: [&str; 2] = [labels::PLACEMENT_GROUP_PARTITION, labels::CAPACITY_RESERVATION_ID];

/// Dimensions that a NodeClaim can restrict: type, zone, capacity type, and [`CHOSEN_AT_LAUNCH`].
const AXES: usize = 3 + CHOSEN_AT_LAUNCH.len();

/// Value index of a column on each axis.
type Point = [usize; AXES];

/// The order in which choices are added after the first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// As given: ascending by price.
    Price,
    /// Other types before other zones and capacity types.
    Types,
    /// Other zones and capacity types before other types.
    Zones,
}

/// The largest part of `columns` (greedily, in `order`, the first column always included) that a NodeClaim can name without
/// naming an offered combination that is not in `columns`, other than those above its maximum price, which are not launched. Usually all of them.
pub(crate) fn nameable(column_sets: &ColumnSets<'_>, columns: &[usize], order: Order) -> Vec<usize> {
    let max_price = columns.first().and_then(|column| max_price(column_sets, *column));
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
    let nameable = |column: &Column| zones.contains(&&column.zone) && capacity_types.contains(&column.capacity_type);
    let mut others: Vec<usize> = Vec::new();
    for shape in shapes {
        let offerings = || column_sets.shapes[shape].first..column_sets.shapes[shape].end;
        // Counted reservations are missing from plans only because of their count: pods may use one wherever they may use the
        // type otherwise.
        let has_sibling = |column: usize| {
            let zone = &column_sets.columns[column].zone;
            offerings().any(|other| chosen.contains(other) && column_sets.columns[other].zone == *zone)
        };
        let is_too_expensive = |column: &Column| max_price.is_some_and(|most| column.paid > most);
        let missing = offerings().filter(|column| {
            let of = &column_sets.columns[*column];
            !chosen.contains(*column) && nameable(of) && !is_too_expensive(of)
        });
        others.extend(missing.filter(|column| column_sets.columns[*column].left.is_none() || !has_sibling(*column)));
    }
    if others.is_empty() {
        return columns.to_vec();
    }
    let mut axes = Axes::of(column_sets, columns);
    let points: Vec<Point> = columns.iter().map(|column| axes.point(column_sets, *column)).collect();
    let first = points[0];
    let forbidden: Vec<Point> =
        others.iter().map(|column| axes.point(column_sets, *column)).filter(|point| *point != first).collect();
    let mut named: Vec<Vec<bool>> = axes.values.iter().map(|values| vec![false; values.len()]).collect();
    let name = |named: &mut Vec<Vec<bool>>, point: &Point| {
        named.iter_mut().zip(point).for_each(|(axis, value)| axis[*value] = true);
    };
    name(&mut named, &first);
    let mut candidates: Vec<&Point> = points.iter().collect();
    match order {
        Order::Price => {}
        Order::Types => candidates.sort_by_key(|point| point[1..] != first[1..]),
        Order::Zones => candidates.sort_by_key(|point| point[0] != first[0]),
    }
    for point in candidates {
        let covers = |other: &Point| (0..AXES).all(|axis| named[axis][other[axis]] || point[axis] == other[axis]);
        let new = (0..AXES).any(|axis| !named[axis][point[axis]]);
        if new && !forbidden.iter().any(covers) {
            name(&mut named, point);
        }
    }
    let kept = |point: &Point| (0..AXES).all(|axis| named[axis][point[axis]]);
    columns.iter().zip(&points).filter(|(_, point)| kept(point)).map(|(column, _)| *column).collect()
}

/// The values of each axis, numbered in order of occurrence.
struct Axes<'u> {
    values: [HashMap<&'u str, usize>; AXES],
    /// Whether all choices have a value of the label; otherwise a NodeClaim cannot restrict it.
    restricted: [bool; CHOSEN_AT_LAUNCH.len()],
}

impl<'u> Axes<'u> {
    fn of(column_sets: &ColumnSets<'_>, columns: &[usize]) -> Self {
        let restricted = |key: &str| columns.iter().all(|column| column_sets.columns[*column].labels.contains_key(key));
        Self { values: Default::default(), restricted: CHOSEN_AT_LAUNCH.map(restricted) }
    }

    fn point(&mut self, column_sets: &'u ColumnSets<'_>, column: usize) -> Point {
        let of = &column_sets.columns[column];
        let value = |axis: usize| match axis {
            0 => &*column_sets.instance_type(column).name,
            1 => &*of.zone,
            2 => of.capacity_type.as_str(),
            label => match of.labels.get(CHOSEN_AT_LAUNCH[label - 3]).filter(|_| self.restricted[label - 3]) {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::pack::nameable::{Order, nameable};
    use crate::test_support::World;
    use crate::test_support::plan_stages::{column, instance};

    /// The columns, as type and zone, of which a NodeClaim can name the result.
    fn named(columns: &[(&str, &str)], order: Order) -> Vec<String> {
        let mut world = World::new();
        world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
        let mut instance = instance(&world);
        let state = instance.state(false);
        let columns: Vec<usize> = columns.iter().map(|(name, zone)| column(&state, name, zone)).collect();
        let text = |column: usize| {
            format!("{} {}", state.column_sets.instance_type(column).name, state.column_sets.columns[column].zone)
        };
        nameable(state.column_sets, &columns, order).into_iter().map(text).collect()
    }

    #[test]
    fn a_full_product_of_types_and_zones_is_nameable() {
        let columns = [("a1.x2", "z-a"), ("a1.x2", "z-b"), ("m1.x2", "z-a"), ("m1.x2", "z-b")];
        assert_eq!(named(&columns, Order::Price).len(), 4);
    }

    #[test]
    fn types_that_exclude_each_others_zones_are_not_named_together() {
        let columns = [("a1.x2", "z-a"), ("m1.x2", "z-b")];
        assert_eq!(named(&columns, Order::Price), ["a1.x2 z-a"]);
    }

    #[test]
    fn the_order_decides_between_more_types_and_more_zones() {
        // Without m1.x2 in z-b, either m1.x2 or z-b can be named.
        let columns = [("a1.x2", "z-a"), ("a1.x2", "z-b"), ("m1.x2", "z-a")];
        assert_eq!(named(&columns, Order::Types), ["a1.x2 z-a", "m1.x2 z-a"]);
        assert_eq!(named(&columns, Order::Zones), ["a1.x2 z-a", "a1.x2 z-b"]);
    }

    #[test]
    fn a_combination_that_is_not_offered_is_no_gap() {
        let columns = [("a1.x4", "z-a"), ("a1.x4", "z-c"), ("g1.x4", "z-a")];
        assert_eq!(named(&columns, Order::Price).len(), 3, "there is no g1.x4 in z-c");
    }
}
