//! The solver: a list of stages over one plan state, repeated until the plan agrees with its own assumptions.

use std::collections::BTreeSet;

use stowage_model::units::MicroUsd;

use crate::columns::bitset::Bits;
use crate::columns::dims::real;
use crate::columns::relevant_pools::with_relevant_pools;
use crate::columns::sets::ColumnSets;
use crate::columns::table::ColumnCache;
use crate::groups::group::Group;
use crate::improve::host_preferences::improve_host_preferences;
use crate::improve::local_search::{improve_other, improve_purchases};
use crate::improve::merge::merge_copies;
use crate::improve::right_size::right_size;
use crate::improve::spread_repair::repair_spread;
use crate::input::problem::Problem;
use crate::input::service_spread::with_services;
use crate::input::volumes::resolve_volumes::resolve;
use crate::output::assemble::assemble;
use crate::output::collect_feedback::{feedback, placed_per_place};
use crate::output::plan::{Plan, rounded_down};
use crate::output::rehearsal::withdraw_unbindable;
use crate::output::restore::{restore, restore_pools};
use crate::pack::colocation::buy_for_affinity_groups;
use crate::pack::fill_existing::fill_existing;
use crate::pack::refill::refill_purchased;
use crate::pack::reserved::{Reservations, fill_reservations};
use crate::pack::strategy::{Bought, buy_best};
use crate::patterns::improve::improve_by_patterns;
use crate::patterns::proof::Proof;
use crate::pricing::lower_bound::{LowerBound, is_exact_bound, lower_bound};
use crate::pricing::subproblem::Subproblem;
use crate::state::feedback::Feedback;
use crate::state::plan_state::PlanState;
use crate::state::solver_instance::SolverInstance;

/// Re-solves for groups that were assigned to a domain without enough capacity.
const MAX_RETRIES: usize = 6;

/// How much time a plan may take for a lower cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// No lower bound, one strategy, and no improvement by patterns of whole pods: for plans that are only compared with each other.
    Quick,
    Normal,
}

/// Plans the placement of every pod: on an existing node, on a new node at least cost, or unschedulable with a reason.
///
/// Synchronous and deterministic: the same problem gives the same plan, and the order of its pods, nodes and NodePools affects
/// nothing but indexes. Every pod is in exactly one of the plan's three lists. `cache` keeps the column table between plans of problems
/// with the same NodePools, daemons and settings; it never changes the plan.
pub fn plan(problem: &Problem, cache: &ColumnCache) -> Plan {
    plan_with(problem, cache, Effort::Normal)
}

/// [`plan`] with another effort.
pub fn plan_with(problem: &Problem, cache: &ColumnCache, effort: Effort) -> Plan {
    let with_default_spread = with_services(problem);
    let problem = with_default_spread.as_ref().unwrap_or(problem);
    match resolve(problem) {
        Some(resolved) => {
            let plan = plan_resolved(&resolved.problem, cache, effort);
            restore(plan, resolved)
        }
        None => plan_resolved(problem, cache, effort),
    }
}

/// A lower bound on the price of new nodes for the pods of a problem, per hour, whatever the weights of the NodePools: no room on nodes that are
/// there counts, and pods that no new node holds cost nothing. `None` when the LP fails. `cache` as for [`plan`].
pub fn least_cost(problem: &Problem, cache: &ColumnCache) -> Option<MicroUsd> {
    let resolved = resolve(problem);
    let problem = resolved.as_ref().map_or(problem, |resolved| &resolved.problem);
    let reduced = with_relevant_pools(problem);
    let problem = reduced.as_ref().map_or(problem, |reduced| &reduced.problem);
    if problem.pods.is_empty() {
        return Some(MicroUsd(0));
    }
    let known = Feedback::default();
    let mut instance = SolverInstance::new(problem, cache, &known);
    let bound = lower_bound(&mut instance.state(false))?;
    Some(rounded_down(bound.cost))
}

/// [`plan_relevant`] with the NodePools that matter.
fn plan_resolved(problem: &Problem, cache: &ColumnCache, effort: Effort) -> Plan {
    match with_relevant_pools(problem) {
        Some(reduced) => restore_pools(plan_relevant(&reduced.problem, cache, effort), &reduced),
        None => plan_relevant(problem, cache, effort),
    }
}

/// Plans all pods at once; in order of priority only if a pod lost its capacity to a pod of lower priority.
fn plan_relevant(problem: &Problem, cache: &ColumnCache, effort: Effort) -> Plan {
    let (plan, displaced_priority) = solve_to_fixpoint(problem, cache, effort, false);
    if displaced_priority.is_some() && displaced_priority > lowest_priority_placed(problem, &plan) {
        solve_to_fixpoint(problem, cache, effort, true).0
    } else {
        plan
    }
}

fn lowest_priority_placed(problem: &Problem, plan: &Plan) -> Option<i32> {
    let new = plan.new_nodes.iter().flat_map(|node| &node.pods);
    let existing = plan.placements.iter().flat_map(|placement| &placement.pods);
    new.chain(existing).map(|pod| problem.pods[*pod].class.priority).min()
}

/// Re-solves until no purchased node introduces a topology domain that the spread assignment did not account for, and while pods are
/// left unplaced in domains without capacity. Returns the best plan and the highest displaced priority.
fn solve_to_fixpoint(problem: &Problem, cache: &ColumnCache, effort: Effort, by_priority: bool) -> (Plan, Option<i32>) {
    let mut known = Feedback::default();
    let mut incumbent: Option<Plan> = None;
    let mut retries = 0;
    loop {
        let (plan, found) = solve_once(problem, cache, effort, by_priority, &known);
        let occupied_domains = known.occupied_domains.len();
        known.occupied_domains.extend(found.occupied_domains);
        if known.occupied_domains.len() > occupied_domains {
            continue;
        }
        let is_short_of_room = !found.room.is_empty();
        known.room.extend(found.room);
        known.displaced_priority = known.displaced_priority.max(found.displaced_priority);
        let objective = |plan: &Plan| (plan.unschedulable.len(), plan.cost);
        if incumbent.as_ref().is_none_or(|incumbent| objective(&plan) < objective(incumbent)) {
            incumbent = Some(plan);
        }
        retries += 1;
        if let Some(best) = incumbent.take_if(|_| !is_short_of_room || retries > MAX_RETRIES) {
            return (best, known.displaced_priority);
        }
    }
}

/// One pass through all stages.
fn solve_once(
    problem: &Problem,
    cache: &ColumnCache,
    effort: Effort,
    by_priority: bool,
    known: &Feedback,
) -> (Plan, Feedback) {
    if problem.pods.is_empty() {
        return (Plan { lower_bound: Some(MicroUsd(0)), optimal: true, ..Plan::default() }, Feedback::default());
    }
    let mut instance = SolverInstance::new(problem, cache, known);
    let priorities = priorities(&instance.groups, by_priority);
    let mut state = instance.state(by_priority);
    let state = &mut state;

    let strategies = if effort == Effort::Normal { usize::MAX } else { 1 };
    let (mut bound, mut proof): (Option<Option<LowerBound>>, Option<Proof>) = (None, None);
    // Whether the purchases of a pass are for all pods of the bound.
    let mut is_whole = false;
    let tiers = tiers(state.column_sets);
    let mut reservations = Reservations::new(state.column_sets);
    for priority in priorities {
        let active = column_pools_of(state, priority);
        fill_existing(state, &active);
        refill_purchased(state, &active);
        for (level, tier) in passes(state, &tiers) {
            if state.demand.is_empty() {
                break;
            }
            if level == 0 {
                fill_reservations(state, &mut reservations, tier, &active);
            }
            let mut subproblem = Subproblem::new(state, level, tier, &active);
            if bound.is_none() && !by_priority && effort == Effort::Normal {
                bound = Some(lower_bound(state));
                is_whole = state.purchased.is_empty();
            }
            state.fixed = state.purchased.len();
            buy_for_affinity_groups(state, &subproblem);
            let bought = buy_best(state, &mut subproblem, strategies);
            if matches!(bought, Bought::Exactly) && !by_priority && tiers.len() == 1 && is_exact_bound(state) {
                bound = Some(Some(LowerBound { cost: real(state.cost()), values: Vec::new() }));
            }
            improve_purchases(state, &mut subproblem);
            if let Bought::Greedily(Some(other)) = bought {
                improve_other(state, &mut subproblem, other);
            }
            let known = bound.as_mut().and_then(Option::as_mut).filter(|_| is_whole);
            if effort == Effort::Normal {
                proof = improve_by_patterns(state, &mut subproblem, known).or(proof);
            }
            is_whole = false;
        }
    }
    state.split_merged();
    let room = placed_per_place(state);
    repair_spread(state);
    right_size(state, 0);
    merge_copies(state);
    improve_host_preferences(state);
    let turns = withdraw_unbindable(state);
    let nothing_to_buy = state.purchased.is_empty() && state.demand.is_empty();
    let bound = bound.flatten().map(|bound| bound.cost).or(nothing_to_buy.then_some(0.0));
    let feedback = feedback(state, room, by_priority);
    let plan = assemble(state, bound, &turns);
    (Plan { proof: proof.filter(|_| !plan.optimal).map(Box::new), ..plan }, feedback)
}

/// Priorities to place in order, highest first; `[None]` places all pods at once.
fn priorities(groups: &[Group], by_priority: bool) -> Vec<Option<i32>> {
    if !by_priority {
        return vec![None];
    }
    let distinct: BTreeSet<i32> = groups.iter().map(|group| group.class.priority).collect();
    distinct.into_iter().rev().map(Some).collect()
}

/// Whether each column pool is of a priority.
fn column_pools_of(state: &PlanState<'_, '_>, priority: Option<i32>) -> Vec<bool> {
    let of_priority = |pool: usize| priority.is_none_or(|priority| state.class(pool).priority == priority);
    (0..state.demand.column_pools.len()).map(of_priority).collect()
}

/// The purchase passes: each preference level, and within it each tier.
fn passes<'t>(state: &PlanState<'_, '_>, tiers: &'t [Bits]) -> impl Iterator<Item = (usize, &'t Bits)> + use<'t> {
    let levels = state.demand.groups.iter().map(|group| group.levels.len()).max().unwrap_or(1);
    (0..levels).flat_map(move |level| tiers.iter().map(move |tier| (level, tier)))
}

/// Columns of the NodePools of each weight, highest weight first: a NodePool is used only where those of higher weight cannot serve.
/// NodePools of equal weight compete by price.
fn tiers(column_sets: &ColumnSets<'_>) -> Vec<Bits> {
    let weights: BTreeSet<i32> = column_sets.problem.pools.iter().map(|pool| pool.weight).collect();
    let of_weight = |weight: i32| {
        column_sets.where_column(|column| column_sets.problem.pools[column_sets.pool(column)].weight == weight)
    };
    weights.into_iter().rev().map(of_weight).collect()
}
