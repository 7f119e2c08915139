//! What no plan can cost less than.

use std::collections::BTreeSet;

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::fits;
use crate::planner::pricing::duals::{CoveringLp, Offer};
use crate::planner::state::plan_state::PlanState;

/// Sets of columns that the bound tells apart.
const BOUND_SETS: usize = 24;
/// Distinct requests of a resource above which their sums are taken to reach everything.
const MOST_REQUESTS: usize = 64;
/// Units up to which sums are worked out: beyond it hardly a room is out of reach.
const UNITS: usize = 4096;

/// What sums of requests of one resource reach: a node of 1930m holds 1900m at most, if all ask for multiples of 100m.
struct Reach {
    /// Largest amount that divides every request.
    unit: i64,
    /// Largest sum not above each number of units.
    most: Vec<i64>,
}

impl Reach {
    /// `None` where there are too many requests to tell, or none. Each request may be used as often as one likes.
    fn of(requests: &BTreeSet<i64>) -> Option<Self> {
        if requests.is_empty() || requests.len() > MOST_REQUESTS {
            return None;
        }
        let unit = requests.iter().copied().fold(0, gcd);
        let steps: Vec<usize> = requests.iter().filter_map(|n| usize::try_from(n / unit).ok()).collect();
        let mut most = vec![0; UNITS];
        for at in 1..UNITS {
            let reached = steps.iter().any(|step| *step <= at && most[at - step] == reals(at - step));
            most[at] = if reached { reals(at) } else { most[at - 1] };
        }
        Some(Self { unit, most })
    }

    /// The most that requests fill of a room.
    fn most(&self, room: i64) -> i64 {
        let units = room.max(0) / self.unit;
        usize::try_from(units).ok().and_then(|at| self.most.get(at)).copied().unwrap_or(units) * self.unit
    }
}

fn reals(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl PlanState<'_, '_, '_> {
    /// A bound on the cost of any plan of new nodes for what is left, whatever the weights of the NodePools and the zones
    /// chosen.
    ///
    /// Every valid plan is a solution of the program of [`crate::planner::pricing::duals`]: its nodes are columns bought, a group's pods lie
    /// on columns that its required node constraints allow (those that ask for an extended resource on columns that hold
    /// one such pod whole), and for each resource the pods on a node ask for no more than its room. Pods of required
    /// anti-affinity on the host that select each other lie on as many nodes as there are pods, so a node is one slot for
    /// them. Of a room no more is used than sums of requests reach. What the program lets happen besides (pods cut, zones
    /// ignored) only makes it cheaper.
    pub fn lower_bound(&mut self) -> Option<f64> {
        let all = Bits::full(self.column_sets.columns.len());
        let round = self.widest(&all);
        let aside = self.hopeless(&round);
        self.demand.take(&aside, 1);
        self.demand.choose_slots(true);
        // A pin is a choice of ours: the bound lets the group go to every domain it may use.
        let mut sets: std::collections::BTreeMap<Vec<i64>, std::collections::HashMap<&Bits, Vec<i64>>> =
            std::collections::BTreeMap::new();
        let dims = self.column_sets.dims.len() + self.demand.slots.len();
        for at in (0..self.demand.items.len()).filter(|at| self.demand.items[*at].left > 0) {
            if round.column_set(self.demand.items[at].place).is_none() {
                continue;
            }
            let group = &self.demand.groups[self.demand.items[at].group];
            let whole =
                if crate::planner::columns::dims::is_extended(&group.need) { group.need.clone() } else { Vec::new() };
            let Some(required) = group.levels.last() else { continue };
            let amount = sets.entry(whole).or_default().entry(required).or_insert_with(|| vec![0; dims]);
            self.demand.add_demand(at, amount);
        }
        let mut demands: Vec<(Bits, Vec<i64>)> = Vec::new();
        for (whole, sets) in sets {
            for (required, amount) in sets {
                let mut bits = required.clone();
                if !whole.is_empty() {
                    bits.and(&self.column_sets.where_column(|column| fits(&whole, self.column_sets.room(column))));
                }
                demands.push((bits, amount));
            }
        }
        demands.sort_by(|a, b| b.1.cmp(&a.1));
        self.demand.give_back(&aside);
        let sets: Vec<(&Bits, &[i64])> = demands.iter().map(|(bits, amount)| (bits, amount.as_slice())).collect();
        let reaches = self.reaches();
        let offer = Offer {
            // Of what is paid, not of what a person makes of it by settings.
            price: |column: usize| self.column_sets.columns[column].paid,
            room: |_: usize, dim: usize, room: i64| {
                reaches.get(dim).and_then(Option::as_ref).map_or(room, |reach| reach.most(room))
            },
        };
        let mut lp = CoveringLp::new(self.column_sets, &sets, &self.demand.slot_caps(), BOUND_SETS, offer);
        let found = lp.prices(demands.iter().enumerate().map(|(at, (_, amount))| (at, amount.as_slice())), 1e-9);
        found.map(|prices| prices.bound)
    }

    /// What sums of what is left reach, by resource.
    fn reaches(&self) -> Vec<Option<Reach>> {
        let mut requests = vec![BTreeSet::new(); self.column_sets.dims.len()];
        for at in (0..self.demand.items.len()).filter(|at| self.demand.items[*at].left > 0) {
            for (of, need) in requests.iter_mut().zip(self.demand.need(at)) {
                if *need > 0 && of.len() <= MOST_REQUESTS {
                    of.insert(*need);
                }
            }
        }
        requests.iter().map(Reach::of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_used_as_far_as_sums_of_requests_reach() {
        let reach = Reach::of(&BTreeSet::from([250, 400])).unwrap();
        for (room, most) in
            [(-5, 0), (240, 0), (250, 250), (399, 250), (660, 650), (700, 650), (950, 900), (1930, 1900)]
        {
            assert_eq!(reach.most(room), most, "{room}");
        }
        // Beyond what was worked out, only the unit counts.
        assert_eq!(reach.most(1_000_049), 1_000_000);
        assert!(Reach::of(&BTreeSet::new()).is_none());
        assert!(Reach::of(&(1..100).collect()).is_none());
    }
}
