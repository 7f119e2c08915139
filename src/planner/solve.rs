//! The plan, step by step.

use std::collections::BTreeSet;

use crate::model::offering::MicroUsd;
use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::fits;
use crate::planner::columns::sets::ColumnSets;
use crate::planner::columns::table::ColumnCache;
use crate::planner::groups::existing::{Existing, existing, free_on};
use crate::planner::groups::group::{group, register};
use crate::planner::groups::topology::counts::Topology;
use crate::planner::groups::topology::domains::{Domains, Room};
use crate::planner::input::problem::Problem;
use crate::planner::input::service_spread::with_services;
use crate::planner::input::volumes::resolve::resolve;
use crate::planner::output::explain::explain;
use crate::planner::output::plan::{ExistingNodePlacement, Plan, Unschedulable};
use crate::planner::output::restore::restore;
use crate::planner::pack::reserved::Reserved;
use crate::planner::state::budget::Budget;
use crate::planner::state::demand::{Content, Demand};
use crate::planner::state::plan_state::PlanState;

/// Most plans that are made for pods that their domain had no room for.
const MOST_TRIES: usize = 6;

/// Plans where every pod goes: onto what exists, onto nodes to buy at least cost, or nowhere with the reason.
///
/// Synchronous and deterministic: the same problem gives the same plan, and the order of its pods, nodes and pools
/// doesn't matter but for the indexes. Every pod is in exactly one of the plan's three lists. `cache` keeps the column table
/// between plans of problems with the same pools, daemons and settings; it never changes the plan.
pub fn plan(problem: &Problem, cache: &ColumnCache) -> Plan {
    let spread = with_services(problem);
    let problem = spread.as_ref().unwrap_or(problem);
    match resolve(problem) {
        Some(resolved) => {
            let plan = in_order(&resolved.problem, cache);
            restore(plan, resolved)
        }
        None => in_order(problem, cache),
    }
}

fn in_order(problem: &Problem, cache: &ColumnCache) -> Plan {
    let (first, displaced_priority) = solve_to_fixpoint(problem, cache, false);
    // Room may have gone to pods of less priority than some that are left out: then in order of priority.
    if displaced_priority.is_some() && displaced_priority > lowest_priority_placed(problem, &first) {
        solve_to_fixpoint(problem, cache, true).0
    } else {
        first
    }
}

/// Plans until no node that is bought makes a domain count that the plan didn't reckon with, and pods that their domain had
/// no room for have been tried in others.
/// Also returns the highest priority of the pods left out that something had room for at first.
fn solve_to_fixpoint(problem: &Problem, cache: &ColumnCache, by_priority: bool) -> (Plan, Option<i32>) {
    let mut known = Lessons::default();
    let mut best: Option<Plan> = None;
    let mut tries = 0;
    loop {
        let (plan, learnt) = solve_once(problem, cache, by_priority, &known);
        let occupied_domains = known.occupied_domains.len();
        known.occupied_domains.extend(learnt.occupied_domains);
        if known.occupied_domains.len() > occupied_domains {
            continue;
        }
        let full = !learnt.room.is_empty();
        known.room.extend(learnt.room);
        known.displaced_priority = known.displaced_priority.max(learnt.displaced_priority);
        let rank = |plan: &Plan| (plan.unschedulable.len(), plan.cost);
        if best.as_ref().is_none_or(|best| rank(&plan) < rank(best)) {
            best = Some(plan);
        }
        tries += 1;
        if let Some(best) = best.take_if(|_| !full || tries > MOST_TRIES) {
            return (best, known.displaced_priority);
        }
    }
}

/// What an attempt found out about domains, for the next.
#[derive(Default)]
struct Lessons {
    occupied_domains: Domains,
    room: Room,
    /// Highest priority of the pods left out that something had room for at first.
    displaced_priority: Option<i32>,
}

fn lowest_priority_placed(problem: &Problem, plan: &Plan) -> Option<i32> {
    let new = plan.new_nodes.iter().flat_map(|node| &node.pods);
    let old = plan.placements.iter().flat_map(|placement| &placement.pods);
    new.chain(old).map(|pod| problem.pods[*pod].class.priority).min()
}

fn solve_once(problem: &Problem, cache: &ColumnCache, by_priority: bool, known: &Lessons) -> (Plan, Lessons) {
    if problem.pods.is_empty() {
        return (Plan { lower_bound: Some(MicroUsd(0)), ..Plan::default() }, Lessons::default());
    }
    let mut column_sets = ColumnSets::new(problem, cache);
    let (mut selectors, counters) = register(problem);
    let groups = group(&mut column_sets, &mut selectors, &counters);
    let (mut nodes, running_counters) = existing(&column_sets, &mut selectors, &counters, &groups);
    let mut topology =
        Topology::new(&column_sets, &mut selectors, &groups, known.occupied_domains.clone(), known.room.clone());
    let parts = topology.assign(&mut column_sets, &mut selectors, &groups, &nodes);
    let demand = Demand::new(&mut column_sets, &topology, &groups, &parts, counters.len(), by_priority);
    let tiers = tiers(&column_sets);
    let mut state = PlanState::new(&mut column_sets, &topology, demand, &mut selectors, &counters);

    state.running_counters = running_counters;
    let mut priorities: Vec<Option<i32>> = vec![None];
    if by_priority {
        let distinct: BTreeSet<i32> = groups.iter().map(|g| g.class.priority).collect();
        priorities = distinct.into_iter().rev().map(Some).collect();
    }
    let hosts: Vec<_> =
        if state.has_soft_hosts() { nodes.iter().map(|node| node.host.clone()).collect() } else { Vec::new() };
    let mut reserved = Reserved::new(state.column_sets);
    let mut placed: Vec<(usize, Content)> = Vec::new();
    for priority in priorities {
        let ranks: Vec<bool> = state
            .demand
            .places
            .iter()
            .map(|place| priority.is_none_or(|p| groups[place.sample].class.priority == p))
            .collect();
        let active = |place: usize| ranks[place];
        placed.extend(state.use_existing(&mut nodes, &active));
        if !state.bought.is_empty() {
            state.top_up(&active);
        }
        let levels = groups.iter().map(|g| g.levels.len()).max().unwrap_or(1);
        'levels: for level in 0..levels {
            for (at, tier) in tiers.iter().enumerate() {
                if state.demand.is_empty() {
                    break 'levels;
                }
                if level == 0 {
                    state.use_reserved(&mut reserved, tier, &active);
                }
                let mut round = state.round(level, tier, &active);
                if level == 0 && at == 0 && priority.is_none() {
                    state.bound = state.lower_bound();
                }
                state.first_prices.clear();
                state.company(&mut round);
                state.buy_best(&mut round);
                state.improve(&mut round);
            }
        }
    }
    let bought = state.bought.iter_mut().map(|node| &mut node.content);
    state.demand.split(placed.iter_mut().map(|(_, content)| content).chain(bought));
    let room = found_room(&state, &placed);
    state.level_out(&mut placed);
    state.right_size();
    if state.has_soft_hosts() {
        state.spread_out(&nodes, &hosts, &mut placed);
    }
    if state.bound.is_none() && state.bought.is_empty() && state.demand.is_empty() {
        state.bound = Some(0.0);
    }

    let mut bought = Bits::empty(state.column_sets.columns.len());
    state.bought.iter().for_each(|node| bought.insert(node.column));
    let priority = |item: &usize| groups[state.demand.items[*item].group].class.priority;
    let lowest = groups.iter().map(|group| group.class.priority).min();
    let left_out = (0..state.demand.items.len()).filter(|item| state.demand.items[*item].left > 0);
    let mut above: Vec<usize> = left_out.filter(|item| !by_priority && Some(priority(item)) > lowest).collect();
    above.sort_by_key(|item| std::cmp::Reverse(priority(item)));
    // Pods of one place mostly ask for much the same: of those that nothing had room for, one is enough.
    above.dedup_by_key(|item| (state.demand.items[*item].place, state.demand.items[*item].group));
    let above: Vec<(usize, i32)> = above.into_iter().map(|item| (item, priority(&item))).collect();
    let displaced_priority =
        above.into_iter().find(|(item, _)| had_room(&mut state, &nodes, *item)).map(|(_, priority)| priority);
    let learnt = Lessons { occupied_domains: topology.overlooked(&bought), room, displaced_priority };

    let mut next: Vec<usize> = state.demand.items.iter().map(|item| item.first).collect();
    let owner: Vec<usize> = state.demand.items.iter().map(|item| item.group).collect();
    let mut pods_of = |item: usize, count: usize| -> Vec<usize> {
        let from = next[item];
        next[item] += count;
        groups[owner[item]].pods[from..from + count].to_vec()
    };
    let mut out = Plan::default();
    for (node, content) in placed {
        let mut pods: Vec<usize> = content.iter().flat_map(|(item, count)| pods_of(*item, *count)).collect();
        pods.sort_unstable();
        out.placements.push(ExistingNodePlacement { node: nodes[node].index, pods });
    }
    merge_placements(&mut out.placements);
    out.new_nodes = state.planned(&mut pods_of);
    out.cost = MicroUsd(out.new_nodes.iter().filter_map(|n| n.choices.first()).map(|c| c.price.0).sum());
    #[allow(clippy::cast_possible_truncation)]
    let bound = state.bound.map(|bound| MicroUsd((bound * (1.0 - 1e-9)).floor() as i64));
    // A bound on the cost of all pods says nothing of a plan that leaves some out.
    out.lower_bound = bound.filter(|bound| *bound <= out.cost);

    let mut refused_from = vec![0; groups.len()];
    for part in &parts {
        let first = refused_from[part.group];
        refused_from[part.group] += part.count;
        if let Some(reason) = &part.refused {
            let pods = &groups[part.group].pods[first..first + part.count];
            // Where no node could be had anywhere, that is the better reason.
            let detail = explain(state.column_sets, &topology, &state.budgets, &groups[part.group], &part.pins);
            let reason = format!("{reason}; {detail}");
            out.unschedulable.extend(pods.iter().map(|pod| Unschedulable { pod: *pod, reason: reason.clone() }));
        }
    }
    for item in 0..state.demand.items.len() {
        let left = state.demand.items[item].left;
        if left == 0 {
            continue;
        }
        let pins = state.demand.places[state.demand.items[item].place].pins.clone();
        let group = &groups[state.demand.items[item].group];
        let reason = explain(state.column_sets, &topology, &state.budgets, group, &pins);
        let pods = pods_of(item, left);
        out.unschedulable.extend(pods.into_iter().map(|pod| Unschedulable { pod, reason: reason.clone() }));
    }
    out.unschedulable.sort_by_key(|u| u.pod);
    (out, learnt)
}

/// Whether a pod could have been placed had it been the first.
fn had_room(state: &mut PlanState<'_, '_, '_>, nodes: &[Existing<'_>], item: usize) -> bool {
    let reservable = state.reservable(state.demand.items[item].place);
    let state = &*state;
    let column_sets = &*state.column_sets;
    let (need, group) = (state.demand.need(item), &state.demand.groups[state.demand.items[item].group]);
    let place = &state.demand.places[state.demand.items[item].place];
    let budgets: Vec<Budget> = column_sets.problem.pools.iter().map(Budget::of).collect();
    let buyable = |column: usize| {
        fits(need, column_sets.room(column))
            && budgets[column_sets.pool(column)].allows(&column_sets.instance_type(column).capacity)
    };
    let widest = place.levels.last().map(|id| &column_sets.sets[*id].bits);
    let left = |column: usize| column_sets.columns[column].left.is_some_and(|left| left > 0);
    widest.is_some_and(|bits| bits.iter().any(buyable))
        || (column_sets.has_counted && reservable.iter().any(|column| left(column) && buyable(column)))
        || nodes.iter().any(|node| {
            place.pins.iter().all(|(key, domain)| state.topology.in_domain(node, *key, *domain))
                && node.state.admits(&group.class)
                && fits(need, &free_on(column_sets, node.state))
        })
}

/// How many pods each domain had room for, of groups that were given more.
fn found_room(state: &PlanState<'_, '_, '_>, existing: &[(usize, Content)]) -> Room {
    let pins = |item: usize| {
        let item = &state.demand.items[item];
        let pins = &state.demand.places[item.place].pins;
        (1..=pins.len()).map(|len| (item.group, pins[..len].to_vec()))
    };
    let left = (0..state.demand.items.len()).filter(|item| state.demand.items[*item].left > 0);
    let mut out: Room = left.flat_map(pins).map(|at| (at, 0)).collect();
    if !out.is_empty() {
        let bought = state.bought.iter().map(|node| &node.content);
        for (item, count) in bought.chain(existing.iter().map(|(_, content)| content)).flatten() {
            for at in pins(*item) {
                if let Some(room) = out.get_mut(&at) {
                    *room += count;
                }
            }
        }
    }
    out
}

fn merge_placements(placements: &mut Vec<ExistingNodePlacement>) {
    placements.sort_by_key(|p| p.node);
    placements.dedup_by(|later, earlier| {
        let same = later.node == earlier.node;
        if same {
            earlier.pods.append(&mut later.pods);
            earlier.pods.sort_unstable();
        }
        same
    });
}

/// Columns of the NodePools of each weight, heaviest first: a NodePool of less weight is used only where the heavier ones
/// can't help. NodePools of one weight compete by price.
fn tiers(column_sets: &ColumnSets<'_>) -> Vec<Bits> {
    let weights: BTreeSet<i32> = column_sets.problem.pools.iter().map(|pool| pool.weight).collect();
    weights
        .into_iter()
        .rev()
        .map(|weight| column_sets.where_column(|c| column_sets.problem.pools[column_sets.pool(c)].weight == weight))
        .collect()
}
