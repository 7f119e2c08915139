//! Merging: copies of a node become fewer, larger nodes where that costs nothing.
//!
//! Most EC2 families cost the same per CPU in every size, so plans of equal price may differ by a factor of fifty in their nodes. Every
//! node has to be launched, to boot and to register, and has agents, addresses and a share of the API server's work. On the other
//! hand, a node that fails or is interrupted takes all of its pods along.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::columns::bitset::Bits;
use crate::pack::min_values::min_values_hold;
use crate::pack::substitutes::{can_hold, common_columns, load};
use crate::state::demand::pattern::Pattern;
use crate::state::plan_state::{PlanState, PurchasedNode};

/// A merged node costs no more than all new nodes divided by this: a plan of many nodes keeps at least so many.
const LEAST_NODES: i64 = 20;
/// Kinds of equal nodes that are tried, those of most copies first.
const MAX_KINDS: usize = 200;

/// A node that replaces `copies` nodes.
struct Merged {
    column: usize,
    copies: usize,
}

/// Merges equal nodes, within the limits of their NodePools. Nodes whose pods have rules or preferences about their host stay. No plan
/// becomes more expensive.
pub(crate) fn merge_copies(state: &mut PlanState<'_, '_>) {
    let most = state.cost() / LEAST_NODES;
    let mut kinds: BTreeMap<(usize, &Pattern), Vec<usize>> = BTreeMap::new();
    for (at, node) in state.purchased.iter().enumerate() {
        let of = &state.column_sets.columns[node.column];
        if of.left.is_none() && (1..=most / 2).contains(&of.price) {
            kinds.entry((node.column, &node.pattern)).or_default().push(at);
        }
    }
    let is_free = |(item, _): &(usize, usize)| state.demand.host(*item).is_free();
    let mut kinds: Vec<Vec<usize>> = kinds
        .into_iter()
        .filter(|((_, pattern), copies)| copies.len() > 1 && pattern.iter().all(is_free))
        .map(|(_, copies)| copies)
        .collect();
    kinds.sort_by_key(|copies| (Reverse(copies.len()), copies[0]));
    kinds.truncate(MAX_KINDS);
    let mut dropped = vec![false; state.purchased.len()];
    for copies in kinds {
        merge_kind(state, &copies, most, &mut dropped);
    }
    let mut dropped = dropped.into_iter();
    state.purchased.retain(|_| !dropped.next().unwrap_or(false));
}

/// Merges these equal nodes: the first of those that a larger node replaces becomes it, and the others are `dropped`.
fn merge_kind(state: &mut PlanState<'_, '_>, mut copies: &[usize], most: i64, dropped: &mut [bool]) {
    let Some(node) = copies.first().map(|at| state.purchased[*at].clone()) else { return };
    let common = common_columns(state, node.column, &node.pattern);
    while let Some(merged) = larger(state, &node, &common, copies.len(), most) {
        let mut done = 0;
        for group in copies.chunks_exact(merged.copies) {
            for _ in group {
                state.refund(node.column);
            }
            if !state.affords(merged.column) {
                state.spend(node.column, group.len());
                break;
            }
            done += group.len();
            state.spend(merged.column, 1);
            state.purchased[group[0]] =
                PurchasedNode { column: merged.column, pattern: times(&node.pattern, merged.copies) };
            for at in &group[1..] {
                dropped[*at] = true;
            }
        }
        copies = &copies[done..];
    }
}

fn times(pattern: &Pattern, copies: usize) -> Pattern {
    pattern.iter().map(|(item, count)| (*item, count * copies)).collect()
}

/// Whether the limits of its NodePool admit `column` instead of `copies` nodes.
fn affords_instead(state: &PlanState<'_, '_>, of: usize, copies: usize, column: usize) -> bool {
    let mut budget = state.budgets[state.column_sets.pool(of)].clone();
    if budget.is_limited() {
        for _ in 0..copies {
            budget.refund(state.column_sets.charge(of));
        }
    }
    budget.allows(state.column_sets.charge(column))
}

/// The column that replaces most of `copies` equal nodes at no higher price, of those that cost at most `most`.
fn larger(state: &PlanState<'_, '_>, node: &PurchasedNode, common: &Bits, copies: usize, most: i64) -> Option<Merged> {
    let sets = &state.column_sets;
    let (own, load) = (&sets.columns[node.column], load(state, &node.pattern));
    let total = |price: i64, copies: usize| price.saturating_mul(i64::try_from(copies).unwrap_or(i64::MAX));
    let mut best: Option<Merged> = None;
    for column in sets.by_price_in(sets.pool(node.column), &load).iter().copied() {
        let of = &sets.columns[column];
        if of.price > most.min(total(own.price, copies)) {
            break;
        }
        if of.price <= own.price || of.capacity_type != own.capacity_type {
            continue;
        }
        let room = sets.room(column).iter().zip(&load).filter(|(_, need)| **need > 0);
        let fit = room.map(|(room, need)| usize::try_from(room / need).unwrap_or(0)).min().unwrap_or(0).min(copies);
        let replaces_more = fit > best.as_ref().map_or(1, |best| best.copies);
        let costs_no_more = of.price <= total(own.price, fit) && of.paid <= total(own.paid, fit);
        let holds = || {
            let load: Vec<i64> = load.iter().map(|need| total(*need, fit)).collect();
            can_hold(state, column, &load, common, node.column)
                && min_values_hold(state, column, &times(&node.pattern, fit))
                && affords_instead(state, node.column, fit, column)
        };
        if replaces_more && costs_no_more && holds() {
            best = Some(Merged { column, copies: fit });
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::improve::merge::merge_copies;
    use crate::test_support::plan_stages::{instance, purchase, purchased};
    use crate::test_support::{HOST, World};

    /// The nodes after `nodes` copies with one pod of two CPUs each were merged, by their number.
    fn merged(pool: Value, spec: &Value, nodes: usize, instance_type: &str) -> Vec<String> {
        let mut world = World::with_pools(&[("default", pool)]);
        world.pods("p", nodes, &json!({"app": "p"}), "2", "1Gi", spec);
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        for _ in 0..nodes {
            purchase(&mut state, instance_type, "z-b", &[("p", 1)]);
        }
        let before = state.cost();
        merge_copies(&mut state);
        assert!(state.cost() <= before);
        let mut counts: Vec<(String, usize)> = Vec::new();
        for node in purchased(&state) {
            match counts.last_mut() {
                Some((last, count)) if *last == node => *count += 1,
                _ => counts.push((node, 1)),
            }
        }
        counts.into_iter().map(|(node, count)| format!("{count} {node}")).collect()
    }

    #[test]
    fn copies_become_fewer_nodes_of_the_same_price_but_no_fewer_than_twenty() {
        let of = |nodes| merged(json!({}), &json!({}), nodes, "a1.x2").join("; ");
        assert_eq!(of(39), "39 a1.x2 in z-b: p 1");
        assert_eq!(of(41), "20 a1.x4 in z-a: p 2; 1 a1.x2 in z-b: p 1");
        assert_eq!(of(100), "25 a1.x8 in z-a: p 4");
        assert_eq!(of(167), "20 a1.x16 in z-a: p 8; 1 a1.x8 in z-a: p 4; 1 a1.x4 in z-a: p 2; 1 a1.x2 in z-b: p 1");
    }

    #[test]
    fn a_larger_node_that_costs_more_or_that_the_pods_do_not_accept_is_no_substitute() {
        let only = |label: &str, value: &str| {
            let selector = json!({"karpenter.k8s.aws/instance-family": "m1", (label): value});
            merged(json!({}), &json!({"nodeSelector": selector}), 60, "m1.x2")
        };
        assert_eq!(only("kubernetes.io/os", "linux"), ["30 m1.x4 in z-a: p 2"], "a size more is above a twentieth");
        assert_eq!(only("topology.kubernetes.io/zone", "z-b"), ["30 m1.x4 in z-b: p 2"]);
        assert_eq!(only("node.kubernetes.io/instance-type", "m1.x2"), ["60 m1.x2 in z-b: p 1"]);
    }

    #[test]
    fn pods_with_rules_about_their_host_stay_apart() {
        let constraint = |when: &str| {
            json!({"maxSkew": 1, "topologyKey": HOST, "whenUnsatisfiable": when,
                "labelSelector": {"matchLabels": {"app": "p"}}})
        };
        for when in ["DoNotSchedule", "ScheduleAnyway"] {
            let spec = json!({"topologySpreadConstraints": [constraint(when)]});
            assert_eq!(merged(json!({}), &spec, 60, "a1.x2"), ["60 a1.x2 in z-b: p 1"], "{when}");
        }
    }

    #[test]
    fn limits_of_the_node_pool_hold() {
        let of = |limits: Value, copies| merged(json!({"limits": limits}), &json!({}), copies, "c1.x2");
        assert_eq!(of(json!({"cpu": "120"}), 60), ["30 a1.x4 in z-a: p 2"], "as many CPUs as before");
        assert_eq!(of(json!({"memory": "240Gi"}), 60), ["30 c1.x4 in z-a: p 2"], "as much memory as before");
        let some = ["10 a1.x4 in z-a: p 2", "20 c1.x4 in z-a: p 2"];
        assert_eq!(of(json!({"memory": "320Gi"}), 60), some, "80 GiB more than before");
    }
}
