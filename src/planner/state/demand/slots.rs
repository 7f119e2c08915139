//! Slots: pods of which one node holds only so many, as resources that prices know of.

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::real;
use crate::planner::state::demand::{Demand, Slot};

/// Most slots that prices know of.
const MAX_SLOTS: usize = 3;

impl Demand<'_> {
    /// Chooses the slots that prices know of: counters whose caps make many nodes necessary, most first. With `certain`,
    /// only those that no plan can do without: pods that keep each other off by required anti-affinity or host ports. (A
    /// spread over hosts caps a node only as long as another has fewer, so it is a slot for our packing, not for a bound.)
    pub fn choose_slots(&mut self, certain: bool) {
        let mut needed: Vec<(usize, Slot)> = Vec::new();
        for (counter, items) in self.capped.iter().enumerate() {
            let id = u32::try_from(counter).unwrap_or(u32::MAX);
            let mut slot = Slot { counter: id, cap: 1, members: Bits::empty(self.items.len()) };
            let mut pods = 0;
            for item in items.iter().copied().filter(|item| self.items[*item].left > 0) {
                let group = &self.groups[self.items[item].group];
                let spread = group.class.spread.iter().any(|s| s.hard && *s.key == *crate::model::labels::HOSTNAME);
                let cap = group.host.caps.iter().find(|(c, _)| *c == id).map_or(1, |(_, cap)| (*cap).max(1));
                if certain && spread {
                    continue;
                }
                pods += self.items[item].left;
                slot.cap = slot.cap.max(i64::from(cap));
                slot.members.insert(item);
            }
            let nodes = pods.div_ceil(usize::try_from(slot.cap).unwrap_or(1));
            if nodes > 1 {
                needed.push((nodes, slot));
            }
        }
        needed.sort_by_key(|(nodes, slot)| (std::cmp::Reverse(*nodes), slot.counter));
        needed.truncate(MAX_SLOTS);
        self.slots = needed.into_iter().map(|(_, slot)| slot).collect();
        let prices = self.dims + self.slots.len();
        for place in &mut self.place_prices {
            place.resize(prices, 0.0);
        }
    }

    /// Nodes that the slots make necessary for what is left.
    pub fn slot_nodes(&self) -> usize {
        let nodes = |slot: &Slot| {
            let pods: usize = slot.members.iter().map(|item| self.items[item].left).sum();
            pods.div_ceil(usize::try_from(slot.cap).unwrap_or(1))
        };
        self.slots.iter().map(nodes).max().unwrap_or(0)
    }

    /// How many of each slot a node has.
    pub fn slot_caps(&self) -> Vec<i64> {
        self.slots.iter().map(|slot| slot.cap).collect()
    }

    /// What the slots of a node are worth at prices of resources and slots.
    pub fn slots_worth(&self, prices: &[f64]) -> f64 {
        let of_slots = prices.get(self.dims..).unwrap_or_default();
        self.slots.iter().zip(of_slots).map(|(slot, price)| real(slot.cap) * price).sum()
    }

    /// Adds what is left of an item to an amount of resources and slots.
    pub fn add_demand(&self, item: usize, amount: &mut [i64]) {
        let left = i64::try_from(self.items[item].left).unwrap_or(i64::MAX);
        for (sum, need) in amount.iter_mut().zip(self.need(item)) {
            *sum += need * left;
        }
        for (sum, slot) in amount[self.dims..].iter_mut().zip(&self.slots) {
            if slot.members.contains(item) {
                *sum += left;
            }
        }
    }

    /// Counters that every new node should serve: slots that are worth something, dearest first.
    pub fn critical(&self) -> Vec<u32> {
        let mut worths: Vec<(f64, u32)> = Vec::new();
        for (at, slot) in self.slots.iter().enumerate() {
            let price = |place: &Vec<f64>| place.get(self.dims + at).copied().unwrap_or(0.0);
            let worth = self.place_prices.iter().map(price).fold(0.0, f64::max);
            if worth > 0.0 {
                worths.push((worth, slot.counter));
            }
        }
        worths.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        worths.into_iter().map(|(_, counter)| counter).collect()
    }
}
