//! Soft preferences about the pods on a host (ScheduleAnyway spread, preferred pod affinity and anti-affinity), met as far as that is
//! free: a local search over moves and swaps of pods between the nodes of the finished plan.
//!
//! Invariants: no node is purchased or made larger, every hard rule still holds, and no pod moves from an initialized node to a
//! node where it must wait.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use crate::columns::dims::fits;
use crate::groups::existing_nodes::HostState;
use crate::pack::min_values::min_values_still_hold;
use crate::state::demand::pattern::{Bin, Pattern, add_pods, remove_pods};
use crate::state::plan_state::{PlanState, PurchasedNode};

/// Feasibility checks per plan.
const MAX_CHECKS: usize = 20_000;
/// Receiving nodes tried per donor.
const MAX_RECEIVERS: usize = 32;
/// Passes over the donors of one counter.
const MAX_PASSES: usize = 6;

/// A node of the finished plan.
struct PlannedHost {
    /// Index into the existing nodes; `None` for a new node.
    existing: Option<usize>,
    /// Column of a new node.
    column: usize,
    /// Pods start at once: the node is initialized.
    initialized: bool,
    /// Capacity and host state without the plan's pods.
    room: Vec<i64>,
    host: HostState,
    pattern: Pattern,
}

/// A move of pods between two nodes, or a swap with as many pods of another item.
struct Move {
    item: usize,
    count: usize,
    swapped_with: Option<usize>,
}

/// Pods that raise a counter, by counter and index of the node.
type Counts = BTreeMap<u32, HashMap<usize, i32>>;

/// The nodes under improvement, and the remaining feasibility checks.
struct Search {
    hosts: Vec<PlannedHost>,
    checks_left: usize,
}

/// Moves pods to nodes that they prefer, then spreads pods that prefer to be apart. Does nothing without host preferences.
pub(crate) fn improve_host_preferences(state: &mut PlanState<'_, '_>) {
    if !state.demand.has_host_preferences() {
        return;
    }
    let mut search = Search { hosts: planned_hosts(state), checks_left: MAX_CHECKS };
    let (mut spread, mut preferred): (Counts, Counts) = (BTreeMap::new(), BTreeMap::new());
    let mut sample: HashMap<u32, usize> = HashMap::new();
    for item in 0..state.demand.items.len() {
        let rules = state.demand.host(item);
        for counter in rules.soft.iter().filter(|counter| rules.raises.contains(counter)) {
            spread.entry(*counter).or_default();
            sample.entry(*counter).or_insert(item);
        }
        for counter in &rules.likes {
            preferred.entry(*counter).or_default();
        }
    }
    // Spread runs last: where both conflict, Karpenter relaxes preferred affinity first.
    count_raised(state, &search.hosts, &mut preferred);
    for (counter, counts) in preferred {
        search.colocate(state, counter, &counts);
    }
    count_raised(state, &search.hosts, &mut spread);
    for (counter, counts) in spread {
        search.spread_counter(state, counter, sample[&counter], counts);
    }
    write_back(state, search.hosts);
}

/// All nodes of the plan, existing ones first.
fn planned_hosts(state: &PlanState<'_, '_>) -> Vec<PlannedHost> {
    let existing = state.existing.iter().zip(&state.initial_hosts).enumerate();
    let mut hosts: Vec<PlannedHost> = existing
        .map(|(at, (node, host))| PlannedHost {
            existing: Some(at),
            column: 0,
            initialized: node.state.initialized,
            room: node.free.clone(),
            host: host.clone(),
            pattern: Vec::new(),
        })
        .collect();
    for (node, pattern) in &state.placements {
        let host = &mut hosts[*node];
        for (item, count) in pattern {
            let pods = i64::try_from(*count).unwrap_or(i64::MAX);
            for (room, need) in host.room.iter_mut().zip(state.demand.need(*item)) {
                *room += need * pods;
            }
            add_pods(&mut host.pattern, *item, *count);
        }
    }
    hosts.extend(state.purchased.iter().map(|node| PlannedHost {
        existing: None,
        column: node.column,
        initialized: false,
        room: state.column_sets.room(node.column).to_vec(),
        host: state.daemon_host(node.column).clone(),
        pattern: node.pattern.clone(),
    }));
    hosts
}

/// Writes the patterns back into the plan; new nodes that became empty are not purchased.
fn write_back(state: &mut PlanState<'_, '_>, hosts: Vec<PlannedHost>) {
    state.placements.clear();
    state.purchased.clear();
    for PlannedHost { existing, column, pattern, .. } in hosts {
        match existing {
            Some(_) if pattern.is_empty() => {}
            Some(node) => state.placements.push((node, pattern)),
            None if pattern.is_empty() => state.refund(column),
            None => state.purchased.push(PurchasedNode { column, pattern }),
        }
    }
}

/// Adds up what raises each of the given counters, by node.
fn count_raised(state: &PlanState<'_, '_>, hosts: &[PlannedHost], counters: &mut Counts) {
    for (at, host) in hosts.iter().enumerate() {
        let planned = host.pattern.iter().flat_map(|(item, count)| {
            let count = i32::try_from(*count).unwrap_or(i32::MAX);
            state.demand.host(*item).raises.iter().map(move |counter| (*counter, count))
        });
        for (counter, count) in host.host.counts.iter().copied().chain(planned) {
            if let Some(counts) = counters.get_mut(&counter) {
                *counts.entry(at).or_default() += count;
            }
        }
    }
}

impl Search {
    /// Moves pods that prefer to share a node with pods that raise a counter to nodes that have such pods.
    fn colocate(&mut self, state: &mut PlanState<'_, '_>, counter: u32, counts: &HashMap<usize, i32>) {
        let mut targets: Vec<usize> = counts.iter().filter(|(_, count)| **count > 0).map(|(at, _)| *at).collect();
        targets.sort_unstable();
        for from in 0..self.hosts.len() {
            for (item, have) in self.hosts[from].pattern.clone() {
                let rules = state.demand.host(item);
                let prefers = rules.likes.contains(&counter) && !rules.raises.contains(&counter);
                let settled = targets.contains(&from);
                if !prefers || settled || !rules.soft.is_empty() || state.demand.is_tied(item) {
                    continue;
                }
                let mut left = have;
                for to in targets.iter().copied().take(MAX_RECEIVERS) {
                    if self.would_wait(from, to) || !self.may_move(state, item, from, to) {
                        continue;
                    }
                    for count in [left, 1] {
                        let all_or_one = Move { item, count, swapped_with: None };
                        while left >= count && left > 0 && self.is_feasible(state, (from, to), &all_or_one) {
                            self.apply((from, to), &all_or_one);
                            left -= count;
                        }
                    }
                }
            }
        }
    }

    /// Evens out the pods that raise a counter and prefer few such pods on their node: nodes with most of them give to nodes with
    /// fewest, in passes, because a receiver may give in turn. `sample` is an item of the counter.
    fn spread_counter(
        &mut self,
        state: &mut PlanState<'_, '_>,
        counter: u32,
        sample: usize,
        mut counts: HashMap<usize, i32>,
    ) {
        let mut donors = donors(&counts);
        if donors.is_empty() {
            return;
        }
        // Nodes with none of the pods that have capacity for one or pods to swap; no more than could ever receive.
        let can_receive = |at: &usize| {
            let host = &self.hosts[*at];
            let takes = !host.pattern.is_empty() || fits(state.demand.need(sample), &host.room);
            !counts.contains_key(at) && takes
        };
        let max = donors.iter().map(|(count, _)| usize::try_from(*count).unwrap_or(0)).sum::<usize>() + MAX_RECEIVERS;
        let receivers: Vec<usize> = (0..self.hosts.len()).filter(can_receive).take(max).collect();
        counts.extend(receivers.into_iter().map(|at| (at, 0)));
        for _ in 0..MAX_PASSES {
            let before = counts.clone();
            for (_, from) in donors {
                self.give(state, counter, from, &mut counts);
            }
            if counts == before {
                break;
            }
            donors = self::donors(&counts);
        }
    }

    /// Gives pods of one node to nodes that have at least two fewer, fewest first.
    fn give(&mut self, state: &mut PlanState<'_, '_>, counter: u32, from: usize, counts: &mut HashMap<usize, i32>) {
        let mut receivers: Vec<(i32, usize)> = counts.iter().map(|(at, count)| (*count, *at)).collect();
        receivers.sort_unstable();
        let mut refusals = 0;
        for (_, to) in receivers {
            if counts[&from] < counts[&to] + 2 || refusals >= MAX_RECEIVERS {
                break;
            }
            if to == from || self.would_wait(from, to) {
                continue;
            }
            let mut moved = false;
            while counts[&from] >= counts[&to] + 2 && self.checks_left > 0 {
                let max = usize::try_from((counts[&from] - counts[&to]) / 2).unwrap_or(0);
                let Some(found) = self.find_move(state, counter, (from, to), max) else { break };
                let change = i32::try_from(found.count).unwrap_or(i32::MAX);
                self.apply((from, to), &found);
                *counts.entry(from).or_default() -= change;
                *counts.entry(to).or_default() += change;
                moved = true;
            }
            refusals += usize::from(!moved);
        }
    }

    /// A feasible move of up to `max` pods that raise a counter, or a swap of one.
    fn find_move(
        &mut self,
        state: &mut PlanState<'_, '_>,
        counter: u32,
        (from, to): (usize, usize),
        max: usize,
    ) -> Option<Move> {
        for (item, have) in self.hosts[from].pattern.clone() {
            let rules = state.demand.host(item);
            let prefers = rules.soft.contains(&counter) && rules.raises.contains(&counter);
            if !prefers || state.demand.is_tied(item) || !self.may_move(state, item, from, to) {
                continue;
            }
            for count in [max.min(have), 1] {
                let found = Move { item, count, swapped_with: None };
                if count > 0 && self.is_feasible(state, (from, to), &found) {
                    return Some(found);
                }
            }
            for (other, _) in self.hosts[to].pattern.clone() {
                let rules = state.demand.host(other);
                if rules.soft.is_empty()
                    && !rules.raises.contains(&counter)
                    && !state.demand.is_tied(other)
                    && self.hosts[from].initialized == self.hosts[to].initialized
                    && self.may_move(state, other, to, from)
                {
                    let found = Move { item, count: 1, swapped_with: Some(other) };
                    if self.is_feasible(state, (from, to), &found) {
                        return Some(found);
                    }
                }
            }
        }
        None
    }

    /// Whether a pod that starts at once on one node would wait for the other.
    fn would_wait(&self, from: usize, to: usize) -> bool {
        self.hosts[from].initialized && !self.hosts[to].initialized
    }

    /// Whether the node constraints of an item admit a node, at a preference level no worse than that of its present node.
    fn may_move(&self, state: &PlanState<'_, '_>, item: usize, from: usize, to: usize) -> bool {
        let (from, to) = (&self.hosts[from], &self.hosts[to]);
        let id = state.demand.items[item].column_pool;
        let pool = &state.demand.column_pools[id];
        let level = |column: usize| pool.levels.iter().position(|id| state.column_sets.sets[*id].bits.contains(column));
        match to.existing {
            Some(node) => {
                let node = &state.existing[node];
                (from.existing.is_some() || pool.levels.len() == 1)
                    && node.state.admits(state.class(id))
                    && pool.pins.iter().all(|(key, domain)| state.topology.in_domain(node, *key, *domain))
            }
            None if from.existing.is_some() => level(to.column) == Some(0),
            None => level(to.column).is_some_and(|here| level(from.column).is_some_and(|there| here <= there)),
        }
    }

    /// Whether both nodes satisfy every hard rule after a move. False once the checks are used up.
    fn is_feasible(&mut self, state: &mut PlanState<'_, '_>, (from, to): (usize, usize), change: &Move) -> bool {
        if self.checks_left == 0 {
            return false;
        }
        self.checks_left -= 1;
        let (from, to) = (&self.hosts[from], &self.hosts[to]);
        let (mut left, mut right) = (from.pattern.clone(), to.pattern.clone());
        exchange(&mut left, &mut right, change);
        [(from, left), (to, right)].into_iter().all(|(host, pattern)| {
            let bin = Bin { room: &host.room, host: &host.host, pattern: &pattern };
            state.demand.is_feasible(&bin)
                && (host.existing.is_some() || min_values_still_hold(state, host.column, &pattern))
        })
    }

    fn apply(&mut self, (from, to): (usize, usize), change: &Move) {
        let mut left = std::mem::take(&mut self.hosts[from].pattern);
        let mut right = std::mem::take(&mut self.hosts[to].pattern);
        exchange(&mut left, &mut right, change);
        self.hosts[from].pattern = left;
        self.hosts[to].pattern = right;
    }
}

/// Nodes with more than one pod of a counter, most first.
fn donors(counts: &HashMap<usize, i32>) -> Vec<(i32, usize)> {
    let mut donors: Vec<_> = counts.iter().filter(|(_, n)| **n > 1).map(|(at, n)| (*n, *at)).collect();
    donors.sort_by_key(|(count, at)| (Reverse(*count), *at));
    donors
}

fn exchange(from: &mut Pattern, to: &mut Pattern, change: &Move) {
    remove_pods(from, change.item, change.count);
    add_pods(to, change.item, change.count);
    if let Some(other) = change.swapped_with {
        remove_pods(to, other, change.count);
        add_pods(from, other, change.count);
    }
}

#[cfg(test)]
mod tests;
