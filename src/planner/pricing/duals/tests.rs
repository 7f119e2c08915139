use serde_json::json;

use crate::columns::bitset::Bits;
use crate::columns::sets::ColumnSets;
use crate::columns::table::ColumnCache;
use crate::pricing::duals::{CoveringLp, LpDemand, Offer, Prices};
use crate::test_support::World;

const GIB: i64 = 1 << 30;

/// The on-demand columns of the catalog.
fn columns(world: &World) -> ColumnSets<'_> {
    ColumnSets::new(&world.problem, &ColumnCache::default())
}

fn world() -> World {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    world
}

fn solve(sets: &ColumnSets<'_>, demands: &[(&Bits, &[i64])], caps: &[i64], max_sets: usize) -> (CoveringLp, Prices) {
    let offer = Offer { price: |column: usize| sets.columns[column].price, room: |_: usize, room: i64| room };
    let of_lp: Vec<LpDemand<'_>> =
        demands.iter().map(|(columns, amount)| LpDemand { columns, amount, tier: 0 }).collect();
    let mut lp = CoveringLp::new(sets, &of_lp, caps, (max_sets, usize::MAX), offer);
    let prices = lp.prices(demands.iter().enumerate().map(|(at, (_, amount))| (at, *amount)), 1e-9).unwrap();
    (lp, prices)
}

#[allow(clippy::cast_possible_truncation)]
fn micro_usd(value: f64) -> i64 {
    value.round() as i64
}

#[test]
fn the_bound_is_the_cheapest_cover_and_the_dual_value_of_the_demand() {
    let world = world();
    let sets = columns(&world);
    let all = Bits::full(sets.columns.len());
    for (cpus, gib, bound) in [
        (16, 0, 640_000),
        (0, 64, 512_000),
        (16, 64, 640_000),
        // Four CPUs of a1 with 16 GiB, and four of r1 with 32 GiB.
        (8, 48, 416_000),
    ] {
        let amount = [cpus * 1000, gib * GIB, 0, 0];
        let (lp, prices) = solve(&sets, &[(&all, &amount)], &[], 12);
        assert_eq!(micro_usd(prices.bound), bound, "{cpus} CPUs, {gib} GiB");
        #[allow(clippy::cast_precision_loss, reason = "amounts far below 2^53")]
        let value: f64 = amount.iter().zip(lp.of_demand(&prices, 0)).map(|(n, price)| *n as f64 * price).sum();
        assert_eq!(micro_usd(value), bound, "strong duality");
    }
}

#[test]
fn demands_that_may_use_fewer_columns_pay_higher_prices() {
    let world = world();
    let sets = columns(&world);
    let all = Bits::full(sets.columns.len());
    let gpu = sets.where_column(|column| sets.instance_type(column).name.starts_with("g1"));
    let amount = [4000, 0, 0, 0];
    let (lp, prices) = solve(&sets, &[(&all, &amount), (&gpu, &amount)], &[], 12);
    // 4 CPUs on a1, and 4 of the 16 CPUs of a g1.x16, which costs less per CPU than a g1.x4.
    assert_eq!(micro_usd(prices.bound), 160_000 + 475_000);
    let per_cpu = |demand: usize| micro_usd(lp.of_demand(&prices, demand)[0] * 1000.0);
    assert_eq!((per_cpu(0), per_cpu(1)), (40_000, 118_750));
    let on_gpu = gpu.iter().next().unwrap();
    assert_eq!(micro_usd(lp.of_column(&prices, on_gpu)[0] * 1000.0), 118_750, "a column pays the highest price");
}

#[test]
fn merged_sets_and_unused_columns_have_prices_too() {
    let world = world();
    let sets = columns(&world);
    let gpu = sets.where_column(|column| sets.instance_type(column).name.starts_with("g1"));
    let arm = sets.where_column(|column| sets.instance_type(column).name.starts_with("a1"));
    let (large, small) = ([8000, 0, 0, 0], [4000, 0, 0, 0]);
    let (lp, prices) = solve(&sets, &[(&arm, &large), (&gpu, &small), (&arm, &small)], &[], 1);
    assert_eq!(micro_usd(prices.bound), 480_000 + 475_000, "one set of its own, the others merged");
    let other = (0..sets.columns.len()).find(|column| !gpu.contains(*column) && !arm.contains(*column)).unwrap();
    assert!(lp.of_column(&prices, other).iter().all(|price| *price == 0.0));
}

#[test]
fn a_host_cap_prices_nodes_where_pods_exclude_each_other() {
    let world = world();
    let sets = columns(&world);
    let all = Bits::full(sets.columns.len());
    // Ten pods of 100m that exclude each other: ten of the cheapest node.
    let (lp, prices) = solve(&sets, &[(&all, &[1000, 0, 10, 0, 10])], &[1], 12);
    assert_eq!(micro_usd(prices.bound), 800_000);
    assert_eq!(micro_usd(lp.of_demand(&prices, 0)[4]), 80_000, "the whole price of a node is that of its cap");
}

#[test]
fn with_many_couplings_fewer_sets_are_distinguished_and_the_value_is_still_a_bound() {
    let world = World::new();
    let column_sets = ColumnSets::new(&world.problem, &ColumnCache::default());
    let of_zone = |zone: &str| column_sets.where_column(|column| &*column_sets.columns[column].zone == zone);
    let bits = ["z-a", "z-b", "z-c"].map(of_zone);
    let amount = [4000, 8 << 30, 4, 0];
    let demands: Vec<LpDemand<'_>> =
        bits.iter().map(|columns| LpDemand { columns, amount: &amount, tier: 0 }).collect();
    let value = |max_couplings: usize| {
        let offer =
            Offer { price: |column: usize| column_sets.columns[column].price, room: |_: usize, room: i64| room };
        let mut lp = CoveringLp::new(&column_sets, &demands, &[], (8, max_couplings), offer);
        assert!(lp.couplings() <= max_couplings.max(column_sets.dims.len()), "{} couplings", lp.couplings());
        lp.prices((0..3).map(|at| (at, amount.as_slice())), 0.0).unwrap().bound
    };
    let (all, merged) = (value(usize::MAX), value(4));
    assert!(merged <= all * (1.0 + 1e-9) && merged > 0.0, "{merged} with merged sets, {all} with all");
}
