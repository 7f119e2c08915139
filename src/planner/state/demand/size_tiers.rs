//! Size tiers: pods of like size, and the columns that can hold one of them whole.
//!
//! The covering LP may split pods. Without tiers, a type that holds no pod at all (2 CPUs with 512 MiB for half a cent) would make
//! one resource almost free for all pods. With tiers, each demand is covered only by columns that hold its smallest pod.

use std::collections::BTreeMap;

use crate::columns::bitset::Bits;
use crate::columns::dims::fits;
use crate::columns::sets::ColumnSets;

/// Tiers in one LP: each multiplies the column sets that it distinguishes.
const MAX_TIERS: usize = 16;
/// Dimensions that tiers distinguish: CPU and memory.
const DIMS: usize = 2;
/// Powers of two of an `i64`.
const POWERS: usize = 64;

/// Items of one column pool and one size tier: they share their dual prices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PriceClass {
    pub column_pool: usize,
    pub tier: usize,
}

/// The size tiers of a demand, and the price class of each item.
pub(crate) struct SizeTiers {
    /// Columns that hold the smallest pod of each tier.
    pub holding: Vec<Bits>,
    /// Ascending by column pool, then tier.
    pub classes: Vec<PriceClass>,
    /// Price class of each item.
    pub class_of: Vec<usize>,
}

impl SizeTiers {
    /// `items` are the column pool and the request of each item.
    pub fn of(column_sets: &ColumnSets<'_>, items: &[(usize, &[i64])]) -> Self {
        let steps = steps(column_sets);
        let mut exact: Vec<[usize; DIMS]> = items.iter().map(|(_, need)| sizes(need, &steps)).collect();
        // Counted from the smallest pod, so that types that hold no pod change nothing.
        let smallest: [usize; DIMS] = std::array::from_fn(|dim| exact.iter().map(|size| size[dim]).min().unwrap_or(0));
        for (size, least) in exact.iter_mut().flat_map(|size| size.iter_mut().zip(smallest)) {
            *size -= least;
        }
        // Tiers of one power of two each, then of two, four, ... until there are few enough.
        let mut tier_of = Vec::new();
        let mut tiers: BTreeMap<[usize; DIMS], usize> = BTreeMap::new();
        for halvings in 0..=2 * POWERS.ilog2() {
            // CPU and memory take turns.
            let coarse = |size: &[usize; DIMS]| [size[0] >> halvings.div_ceil(2), size[1] >> (halvings / 2)];
            tiers = exact.iter().map(|size| (coarse(size), 0)).collect();
            if tiers.len() <= MAX_TIERS {
                tiers.values_mut().enumerate().for_each(|(at, id)| *id = at);
                tier_of = exact.iter().map(|size| tiers[&coarse(size)]).collect();
                break;
            }
        }
        let mut least: Vec<Vec<i64>> = vec![vec![i64::MAX; column_sets.dims.len()]; tiers.len()];
        for ((_, need), tier) in items.iter().zip(&tier_of) {
            least[*tier].iter_mut().zip(*need).for_each(|(least, need)| *least = (*least).min(*need));
        }
        let holds = |least: &Vec<i64>| column_sets.where_column(|column| fits(least, column_sets.room(column)));
        let class = |((column_pool, _), tier): (&(usize, &[i64]), &usize)| PriceClass {
            column_pool: *column_pool,
            tier: *tier,
        };
        let mut classes: Vec<PriceClass> = items.iter().zip(&tier_of).map(class).collect();
        let of_items = classes.clone();
        classes.sort_unstable();
        classes.dedup();
        let class_of = of_items.iter().map(|class| classes.binary_search(class).unwrap_or_default()).collect();
        Self { holding: least.iter().map(holds).collect(), classes, class_of }
    }

    /// Columns that hold the smallest pod of some tier.
    pub fn holding_some(&self) -> Option<Bits> {
        let mut tiers = self.holding.iter();
        let mut bits = tiers.next()?.clone();
        tiers.for_each(|holding| bits.or(holding));
        Some(bits)
    }
}

/// The largest room of any column by power of two, in each dimension.
fn steps(column_sets: &ColumnSets<'_>) -> [[i64; POWERS]; DIMS] {
    let mut steps = [[0; POWERS]; DIMS];
    for column in 0..column_sets.columns.len() {
        for (step, room) in steps.iter_mut().zip(column_sets.room(column)) {
            if let Some(power) = room.checked_ilog2() {
                let largest = &mut step[power as usize];
                *largest = (*largest).max(*room);
            }
        }
    }
    steps
}

/// The power of two of the least room that holds a request, counted from the least of any column, in each dimension.
fn sizes(need: &[i64], steps: &[[i64; POWERS]; DIMS]) -> [usize; DIMS] {
    std::array::from_fn(|dim| {
        let offered = steps[dim].iter().filter(|largest| **largest > 0);
        offered.take_while(|largest| **largest < need[dim]).count()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::test_support::World;
    use crate::test_support::plan_stages::{instance, item};

    #[test]
    fn pods_of_a_tier_share_the_least_column_size_and_smaller_columns_are_excluded() {
        let mut world = World::new();
        for (name, cpu, memory) in
            [("tiny", "100m", "1Gi"), ("small", "2", "3Gi"), ("large", "2001m", "3Gi"), ("wide", "100m", "40Gi")]
        {
            world.pods(name, 1, &json!({}), cpu, memory, &json!({}));
        }
        let mut instance = instance(&world);
        let state = instance.state(false);
        let tiers = &state.demand.tiers;
        let tier = |name: &str| tiers.classes[tiers.class_of[item(&state, name)]].tier;
        assert_eq!(tier("tiny"), tier("small"));
        assert!(tier("large") != tier("small") && tier("wide") != tier("small"));
        let held = |name: &str| tiers.holding[tier(name)].len();
        let columns = state.column_sets.columns.len();
        assert_eq!(held("tiny"), columns);
        assert!(held("large") < columns && held("wide") < held("large"), "{} {}", held("large"), held("wide"));
    }
}
