//! Preferences about pods on one host (soft spread, preferred affinity and anti-affinity), met as far as that is free: once all nodes
//! are chosen, pods move to nodes where what they like is, and from nodes where many
//! alike are to nodes where few are, or change places with others. No node is
//! bought or made larger for it, and no pod that can start at once is made to wait.

use std::collections::{BTreeMap, HashMap};

use crate::planner::columns::dims::fits;
use crate::planner::groups::existing::{Existing, HostState};
use crate::planner::state::demand::{Bin, Content};
use crate::planner::state::plan_state::{PlanState, PurchasedNode};

/// Fits that may be tried, which bounds the work of one plan.
const TRIES: usize = 20_000;
/// Nodes that may refuse a crowded node's pods before it gives up.
const RECEIVERS: usize = 32;
/// Rounds of giving.
const ROUNDS: usize = 6;

/// A node with what the plan puts there.
struct Seat {
    /// Index into the nodes that exist, or `None` for a new one.
    old: Option<usize>,
    /// Column of a new node.
    column: usize,
    /// Pods start there at once.
    ready: bool,
    /// Room before the plan puts anything there.
    room: Vec<i64>,
    host: HostState,
    content: Content,
}

/// Pods of an item to move, and pods of another that come back for them.
struct Shift {
    item: usize,
    count: usize,
    back: Option<usize>,
}

/// Pods that raise a counter, by counter and seat.
type Counts = BTreeMap<u32, HashMap<usize, i32>>;

impl<'p> PlanState<'_, 'p, '_> {
    /// Whether anything prefers some or few pods on its host.
    pub fn has_soft_hosts(&self) -> bool {
        let soft = |item| !self.demand.host(item).soft.is_empty() || !self.demand.host(item).likes.is_empty();
        (0..self.demand.items.len()).any(soft)
    }

    /// Brings together what prefers company, and evens out what prefers to be apart. `hosts` are the nodes' rules before the plan put anything there.
    pub fn spread_out(&mut self, nodes: &[Existing<'p>], hosts: &[HostState], placed: &mut Vec<(usize, Content)>) {
        let mut seats = self.seats(nodes, hosts, placed);
        let (mut crowded, mut liked): (Counts, Counts) = (BTreeMap::new(), BTreeMap::new());
        let mut sample: HashMap<u32, usize> = HashMap::new();
        for item in 0..self.demand.items.len() {
            let rules = self.demand.host(item);
            for counter in rules.soft.iter().filter(|counter| rules.raises.contains(counter)) {
                crowded.entry(*counter).or_default();
                sample.entry(*counter).or_insert(item);
            }
            for counter in &rules.likes {
                liked.entry(*counter).or_default();
            }
        }
        let mut tries = TRIES;
        // Company first: of the two, Karpenter gives it up first.
        self.count(&seats, &mut liked);
        for (counter, counts) in liked {
            self.gather(counter, &counts, nodes, &mut seats, &mut tries);
        }
        self.count(&seats, &mut crowded);
        for (counter, counts) in crowded {
            self.even_out((counter, sample[&counter]), counts, nodes, &mut seats, &mut tries);
        }
        placed.clear();
        let mut bought = std::mem::take(&mut self.bought).into_iter();
        for seat in seats {
            let content = seat.content;
            match (seat.old, content.is_empty()) {
                (Some(_), true) => {}
                (Some(node), false) => placed.push((node, content)),
                (None, empty) => {
                    let node = bought.next().expect("a new node has a seat each");
                    if empty {
                        let pool = self.column_sets.pool(node.column);
                        self.budgets[pool].refund(&self.column_sets.instance_type(node.column).capacity);
                    } else {
                        self.bought.push(PurchasedNode { content, ..node });
                    }
                }
            }
        }
    }

    /// Counts what raises each counter, by seat.
    fn count(&self, seats: &[Seat], counters: &mut Counts) {
        for (at, seat) in seats.iter().enumerate() {
            let planned = seat.content.iter().flat_map(|(item, count)| {
                let count = i32::try_from(*count).unwrap_or(i32::MAX);
                self.demand.host(*item).raises.iter().map(move |counter| (*counter, count))
            });
            for (counter, count) in seat.host.counts.iter().copied().chain(planned) {
                if let Some(counts) = counters.get_mut(&counter) {
                    *counts.entry(at).or_default() += count;
                }
            }
        }
    }

    /// Moves pods that would like to be with what raises a counter to where it is, as far as there is room.
    fn gather(
        &mut self,
        counter: u32,
        counts: &HashMap<usize, i32>,
        nodes: &[Existing<'p>],
        seats: &mut [Seat],
        tries: &mut usize,
    ) {
        let mut company: Vec<usize> = counts.iter().filter(|(_, count)| **count > 0).map(|(at, _)| *at).collect();
        company.sort_unstable();
        for from in 0..seats.len() {
            for (item, have) in seats[from].content.clone() {
                let rules = self.demand.host(item);
                let lonely = rules.likes.contains(&counter) && !rules.raises.contains(&counter);
                if !lonely || !rules.soft.is_empty() || company.contains(&from) || !self.is_free_to_move(item) {
                    continue;
                }
                let mut left = have;
                for to in company.iter().copied().take(RECEIVERS) {
                    if (seats[from].ready && !seats[to].ready) || !self.may_sit(item, nodes, &seats[from], &seats[to]) {
                        continue;
                    }
                    for count in [left, 1] {
                        let shift = Shift { item, count, back: None };
                        while left >= count && left > 0 && self.works(seats, (from, to), &shift, tries) {
                            apply(seats, (from, to), &shift);
                            left -= count;
                        }
                    }
                }
            }
        }
    }

    fn seats(&self, nodes: &[Existing<'p>], hosts: &[HostState], placed: &[(usize, Content)]) -> Vec<Seat> {
        let mut seats: Vec<Seat> = nodes
            .iter()
            .zip(hosts)
            .enumerate()
            .map(|(at, (node, host))| Seat {
                old: Some(at),
                column: 0,
                ready: node.state.initialized,
                room: node.free.clone(),
                host: host.clone(),
                content: Vec::new(),
            })
            .collect();
        for (node, content) in placed {
            let seat = &mut seats[*node];
            for (item, count) in content {
                let count_wide = i64::try_from(*count).unwrap_or(i64::MAX);
                for (room, need) in seat.room.iter_mut().zip(self.demand.need(*item)) {
                    *room += need * count_wide;
                }
                add(&mut seat.content, *item, *count);
            }
        }
        seats.extend(self.bought.iter().map(|node| Seat {
            old: None,
            column: node.column,
            ready: false,
            room: self.column_sets.room(node.column).to_vec(),
            host: self.daemon_host(node.column).clone(),
            content: node.content.clone(),
        }));
        seats
    }

    fn even_out(
        &mut self,
        (counter, sample): (u32, usize),
        mut counts: HashMap<usize, i32>,
        nodes: &[Existing<'p>],
        seats: &mut [Seat],
        tries: &mut usize,
    ) {
        let alike = |counts: &HashMap<usize, i32>| -> Vec<(i32, usize)> {
            let mut donors: Vec<_> = counts.iter().filter(|(_, n)| **n > 1).map(|(at, n)| (*n, *at)).collect();
            donors.sort_by_key(|(count, at)| (std::cmp::Reverse(*count), *at));
            donors
        };
        let mut donors = alike(&counts);
        if donors.is_empty() {
            return;
        }
        // Nodes that have none of them and could take one, for room or in exchange; a few are enough.
        let could = |at: &usize| {
            !counts.contains_key(at)
                && (!seats[*at].content.is_empty() || fits(self.demand.need(sample), &seats[*at].room))
        };
        let most = donors.iter().map(|(count, _)| usize::try_from(*count).unwrap_or(0)).sum::<usize>() + RECEIVERS;
        let empty: Vec<usize> = (0..seats.len()).filter(could).take(most).collect();
        for at in empty {
            counts.insert(at, 0);
        }
        // Who has received may give in its turn.
        for _ in 0..ROUNDS {
            let before = counts.clone();
            for (_, from) in donors {
                self.offer(counter, from, &mut counts, nodes, seats, tries);
            }
            if counts == before {
                break;
            }
            donors = alike(&counts);
        }
    }

    /// Gives pods of one node to those that have fewer.
    fn offer(
        &mut self,
        counter: u32,
        from: usize,
        counts: &mut HashMap<usize, i32>,
        nodes: &[Existing<'p>],
        seats: &mut [Seat],
        tries: &mut usize,
    ) {
        let mut receivers: Vec<(i32, usize)> = counts.iter().map(|(at, count)| (*count, *at)).collect();
        receivers.sort_unstable();
        let mut refused = 0;
        for (_, to) in receivers {
            if counts[&from] < counts[&to] + 2 || refused >= RECEIVERS {
                break;
            }
            if to == from || (seats[from].ready && !seats[to].ready) {
                continue;
            }
            let mut moved = false;
            while counts[&from] >= counts[&to] + 2 && *tries > 0 {
                let most = usize::try_from((counts[&from] - counts[&to]) / 2).unwrap_or(0);
                let Some(shift) = self.shift(counter, nodes, seats, (from, to), most, tries) else { break };
                let change = i32::try_from(shift.count).unwrap_or(i32::MAX);
                apply(seats, (from, to), &shift);
                *counts.entry(from).or_default() -= change;
                *counts.entry(to).or_default() += change;
                moved = true;
            }
            refused += usize::from(!moved);
        }
    }

    /// Pods that could move between two nodes: as many as fit, or one for another.
    fn shift(
        &mut self,
        counter: u32,
        nodes: &[Existing<'p>],
        seats: &[Seat],
        (from, to): (usize, usize),
        most: usize,
        tries: &mut usize,
    ) -> Option<Shift> {
        for (item, have) in &seats[from].content {
            let rules = self.demand.host(*item);
            let likes = rules.soft.contains(&counter) && rules.raises.contains(&counter);
            if !likes || !self.is_free_to_move(*item) || !self.may_sit(*item, nodes, &seats[from], &seats[to]) {
                continue;
            }
            for count in [most.min(*have), 1] {
                let shift = Shift { item: *item, count, back: None };
                if count > 0 && self.works(seats, (from, to), &shift, tries) {
                    return Some(shift);
                }
            }
            for (other, _) in &seats[to].content {
                let rules = self.demand.host(*other);
                if rules.soft.is_empty()
                    && !rules.raises.contains(&counter)
                    && self.is_free_to_move(*other)
                    && seats[from].ready == seats[to].ready
                    && self.may_sit(*other, nodes, &seats[to], &seats[from])
                {
                    let shift = Shift { item: *item, count: 1, back: Some(*other) };
                    if self.works(seats, (from, to), &shift, tries) {
                        return Some(shift);
                    }
                }
            }
        }
        None
    }

    /// Pods that lead or follow others on one host stay with them.
    fn is_free_to_move(&self, item: usize) -> bool {
        let rules = self.demand.host(item);
        rules.wants.is_empty()
            && self
                .demand
                .wanting()
                .iter()
                .all(|other| self.demand.host(*other).wants.iter().all(|(counter, _)| !rules.raises.contains(counter)))
    }

    /// Whether a pod may be on a node, and likes it no less than the one it is on.
    fn may_sit(&self, item: usize, nodes: &[Existing<'p>], from: &Seat, to: &Seat) -> bool {
        let place = &self.demand.places[self.demand.items[item].place];
        let level = |column: usize| place.levels.iter().position(|id| self.column_sets.sets[*id].bits.contains(column));
        match to.old {
            Some(node) => {
                let node = &nodes[node];
                (from.old.is_some() || place.levels.len() == 1)
                    && node.state.admits(&self.demand.groups[place.sample].class)
                    && place.pins.iter().all(|(key, domain)| self.topology.in_domain(node, *key, *domain))
            }
            None if from.old.is_some() => level(to.column) == Some(0),
            None => level(to.column).is_some_and(|here| level(from.column).is_some_and(|there| here <= there)),
        }
    }

    /// Whether both nodes keep every rule after a shift.
    fn works(&mut self, seats: &[Seat], (from, to): (usize, usize), shift: &Shift, tries: &mut usize) -> bool {
        if *tries == 0 {
            return false;
        }
        *tries -= 1;
        let (mut left, mut right) = (seats[from].content.clone(), seats[to].content.clone());
        exchange(&mut left, &mut right, shift);
        [(&seats[from], left), (&seats[to], right)].into_iter().all(|(seat, content)| {
            let bin = Bin { room: &seat.room, host: &seat.host, content: &content };
            self.demand.host_starts(&bin) && (seat.old.is_some() || self.min_values_still_hold(seat.column, &content))
        })
    }
}

fn apply(seats: &mut [Seat], (from, to): (usize, usize), shift: &Shift) {
    let mut left = std::mem::take(&mut seats[from].content);
    let mut right = std::mem::take(&mut seats[to].content);
    exchange(&mut left, &mut right, shift);
    seats[from].content = left;
    seats[to].content = right;
}

fn exchange(from: &mut Content, to: &mut Content, shift: &Shift) {
    remove(from, shift.item, shift.count);
    add(to, shift.item, shift.count);
    if let Some(back) = shift.back {
        remove(to, back, shift.count);
        add(from, back, shift.count);
    }
}

fn add(content: &mut Content, item: usize, count: usize) {
    match content.iter_mut().find(|(have, _)| *have == item) {
        Some((_, have)) => *have += count,
        None => content.push((item, count)),
    }
}

fn remove(content: &mut Content, item: usize, count: usize) {
    if let Some((_, have)) = content.iter_mut().find(|(have, _)| *have == item) {
        *have = have.saturating_sub(count);
    }
    content.retain(|(_, count)| *count > 0);
}
