//! Host caps in the covering LP: anti-affinity, spread over hosts and host ports limit the pods of a set on one node, which dual
//! prices account for as a resource of which every column offers the same amount.

use std::cmp::Reverse;

use stowage_model::labels;

use crate::columns::bitset::Bits;
use crate::columns::dims::real;
use crate::state::demand::{Demand, HostCap};

/// Host caps in one LP: each adds a dimension to it.
const MAX_HOST_CAPS: usize = 3;

impl Demand<'_> {
    /// Chooses the host caps that the LP accounts for: those that require most nodes. With `certain`, only caps that hold in
    /// every plan, which a lower bound may use: required anti-affinity and host ports. A spread over hosts caps a node only
    /// while another node has fewer pods.
    pub fn choose_host_caps(&mut self, certain: bool) {
        let mut chosen: Vec<(usize, HostCap)> = Vec::new();
        for (counter, items) in self.capped_items.iter().enumerate() {
            let id = u32::try_from(counter).unwrap_or(u32::MAX);
            let mut host_cap = HostCap { counter: id, per_node: 1, members: Bits::empty(self.items.len()) };
            let mut pods = 0;
            for item in items.iter().copied().filter(|item| self.items[*item].remaining > 0) {
                let group = &self.groups[self.items[item].group];
                let spread = group.class.spread.iter().any(|s| s.hard && *s.key == *labels::HOSTNAME);
                let cap = group.host.caps.iter().find(|(c, _)| *c == id).map_or(1, |(_, cap)| (*cap).max(1));
                if certain && spread {
                    continue;
                }
                pods += self.items[item].remaining;
                host_cap.per_node = host_cap.per_node.max(i64::from(cap));
                host_cap.members.insert(item);
            }
            let nodes = host_cap.nodes_for(pods);
            if nodes > 1 {
                chosen.push((nodes, host_cap));
            }
        }
        chosen.sort_by_key(|(nodes, cap)| (Reverse(*nodes), cap.counter));
        chosen.truncate(MAX_HOST_CAPS);
        self.host_caps = chosen.into_iter().map(|(_, cap)| cap).collect();
        let dims = self.dims + self.host_caps.len();
        for prices in &mut self.prices {
            prices.resize(dims, 0.0);
        }
    }

    /// Nodes that the host caps require for the remaining demand.
    pub fn nodes_for_host_caps(&self) -> usize {
        let remaining = |cap: &HostCap| -> usize { cap.members.iter().map(|item| self.items[item].remaining).sum() };
        self.host_caps.iter().map(|cap| cap.nodes_for(remaining(cap))).max().unwrap_or(0)
    }

    /// Units of each host cap that a node has.
    pub fn caps_per_node(&self) -> Vec<i64> {
        self.host_caps.iter().map(|cap| cap.per_node).collect()
    }

    /// Value of all host cap units of a node at prices of resources and host caps.
    pub fn caps_value(&self, prices: &[f64]) -> f64 {
        let cap_prices = prices.get(self.dims..).unwrap_or_default();
        self.host_caps.iter().zip(cap_prices).map(|(cap, price)| real(cap.per_node) * price).sum()
    }

    /// Adds the remaining pods of an item to amounts of resources and host caps.
    pub fn add_amount(&self, item: usize, amount: &mut [i64]) {
        let remaining = i64::try_from(self.items[item].remaining).unwrap_or(i64::MAX);
        for (sum, need) in amount.iter_mut().zip(self.need(item)) {
            *sum += need * remaining;
        }
        for (sum, cap) in amount[self.dims..].iter_mut().zip(&self.host_caps) {
            if cap.members.contains(item) {
                *sum += remaining;
            }
        }
    }

    /// Counters of the host caps with a positive dual price, most expensive first: every new node should use a unit of each.
    pub fn binding_counters(&self) -> Vec<u32> {
        let mut priced: Vec<(f64, u32)> = Vec::new();
        for (at, cap) in self.host_caps.iter().enumerate() {
            let price = |prices: &Vec<f64>| prices.get(self.dims + at).copied().unwrap_or(0.0);
            let highest = self.prices.iter().map(price).fold(0.0, f64::max);
            if highest > 0.0 {
                priced.push((highest, cap.counter));
            }
        }
        priced.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        priced.into_iter().map(|(_, counter)| counter).collect()
    }
}

impl HostCap {
    fn nodes_for(&self, pods: usize) -> usize {
        pods.div_ceil(usize::try_from(self.per_node).unwrap_or(1))
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "sums of whole numbers are exact")]
mod tests {
    use serde_json::json;

    use crate::test_support::plan_stages::instance;
    use crate::test_support::{HOST, World, affinity, spread};

    #[test]
    fn anti_affinity_is_a_certain_host_cap_and_spread_over_hosts_is_not() {
        let labels = json!({"app": "p"});
        let anti = affinity("podAntiAffinity", HOST, &labels);
        let over_hosts = spread(HOST, &labels, &json!({"maxSkew": 2}));
        for (spec, certain, caps, nodes) in [
            (&anti, true, vec![1], 5),
            (&anti, false, vec![1], 5),
            (&over_hosts, true, vec![], 0),
            (&over_hosts, false, vec![2], 3),
            (&json!({}), false, vec![], 0),
        ] {
            let mut world = World::new();
            world.pods("p", 5, &labels, "1", "1Gi", spec);
            let mut instance = instance(&world);
            let mut state = instance.state(false);
            state.demand.choose_host_caps(certain);
            let found = (state.demand.caps_per_node(), state.demand.nodes_for_host_caps());
            assert_eq!(found, (caps, nodes), "{spec}, certain: {certain}");
        }
    }

    #[test]
    fn only_the_caps_that_require_most_nodes_are_chosen() {
        let mut world = World::new();
        for (name, pods) in [("a", 2), ("b", 5), ("c", 4), ("d", 3)] {
            let labels = json!({"app": name});
            world.pods(name, pods, &labels, "1", "1Gi", &affinity("podAntiAffinity", HOST, &labels));
        }
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        state.demand.choose_host_caps(true);
        assert_eq!((state.demand.host_caps.len(), state.demand.nodes_for_host_caps()), (3, 5));
        state.demand.take(&[(1, 3)], 1);
        assert_eq!(state.demand.nodes_for_host_caps(), 4, "of the remaining demand");
    }

    #[test]
    fn a_cap_is_a_resource_with_an_amount_a_price_and_a_value() {
        let labels = json!({"app": "p"});
        let mut world = World::new();
        world.pods("p", 3, &labels, "2", "1Gi", &affinity("podAntiAffinity", HOST, &labels));
        let mut instance = instance(&world);
        let mut state = instance.state(false);
        state.demand.choose_host_caps(true);
        let mut amount = vec![0; 5];
        state.demand.add_amount(0, &mut amount);
        assert_eq!(amount, [6000, 3 << 30, 3, 0, 3]);
        assert!(state.demand.binding_counters().is_empty(), "no price yet");
        state.demand.set_prices(0, vec![1.0, 0.0, 0.0, 0.0, 500.0]);
        assert_eq!((state.demand.binding_counters().len(), state.demand.value(0)), (1, 2500.0));
        assert_eq!(state.demand.caps_value(&[1.0, 0.0, 0.0, 0.0, 500.0]), 500.0);
    }
}
