//! Buying: nodes are bought one kind at a time, each the best value at the dual prices of what is left.

use super::bits::Bits;
use super::duals::{Prices, Supply, prices};
use super::existing::{Existing, HostState, admits};
use super::groups::{Group, HostCounters};
use super::resources::Resources;
use super::selectors::Selectors;
use super::stock::{Bin, Content, Stock, float, real, worth};
use super::topology::Topology;
use super::universe::{Universe, fits};

/// A node that is bought.
#[derive(Clone, Debug)]
pub(super) struct Bought {
    pub column: usize,
    pub content: Content,
}

/// Room under a NodePool's limits.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    left: Vec<(std::sync::Arc<str>, i64)>,
    nodes: Option<i64>,
}

impl Budget {
    pub fn of(pool: &super::problem::Pool) -> Self {
        let left = pool.limits.iter().flat_map(|limits| {
            pool.limited
                .iter()
                .map(|name| (std::sync::Arc::clone(name), limits.get(name) - pool.usage.get(name)))
        });
        Self {
            left: left.collect(),
            nodes: pool.node_limit.map(|most| most - pool.node_count),
        }
    }

    pub fn allows(&self, capacity: &Resources) -> bool {
        self.nodes.is_none_or(|n| n > 0)
            && self
                .left
                .iter()
                .all(|(name, left)| capacity.get(name) <= (*left).max(0))
    }

    /// How many more of this capacity, at most `most`.
    fn copies(&self, capacity: &Resources, most: usize) -> usize {
        let mut copies = i64::try_from(most).unwrap_or(i64::MAX);
        if let Some(nodes) = self.nodes {
            copies = copies.min(nodes);
        }
        for (name, left) in &self.left {
            let each = capacity.get(name);
            if each > 0 {
                copies = copies.min(left / each);
            }
        }
        usize::try_from(copies.max(0)).unwrap_or(0)
    }

    pub fn spend(&mut self, capacity: &Resources, copies: usize) {
        let copies = i64::try_from(copies).unwrap_or(i64::MAX);
        self.nodes = self.nodes.map(|n| n - copies);
        for (name, left) in &mut self.left {
            *left -= capacity.get(name) * copies;
        }
    }

    pub fn refund(&mut self, capacity: &Resources) {
        self.nodes = self.nodes.map(|n| n + 1);
        for (name, left) in &mut self.left {
            *left += capacity.get(name);
        }
    }

    /// Gives back the count of one node, when only its capacity was to be spent.
    pub fn add_node(&mut self) {
        self.nodes = self.nodes.map(|n| n + 1);
    }

    /// The limit that stops this capacity: its name, and what is left.
    pub fn stopper(&self, capacity: &Resources) -> Option<&str> {
        if self.nodes.is_some_and(|n| n <= 0) {
            return Some("nodes");
        }
        self.left
            .iter()
            .find(|(name, left)| capacity.get(name) > (*left).max(0))
            .map(|(name, _)| name.as_ref())
    }
}

/// Everything a plan is made with.
pub(super) struct Packer<'u, 'p, 'g> {
    pub universe: &'u mut Universe<'p>,
    pub topology: &'u Topology,
    pub stock: Stock<'g>,
    pub bought: Vec<Bought>,
    pub budgets: Vec<Budget>,
    /// Host state of a new node, by set of daemons.
    daemon_hosts: Vec<HostState>,
    /// Prices of the first demand, for right-sizing and existing nodes.
    pub reference: Vec<f64>,
    pub bound: Option<f64>,
    /// Work done so far, in bins filled.
    pub fills: usize,
}

/// What is bought in one round: the columns each place may use.
pub(super) struct Round {
    signature: Vec<Option<usize>>,
    shapes: Vec<Option<Bits>>,
    dead: Vec<bool>,
}

impl<'u, 'p, 'g> Packer<'u, 'p, 'g> {
    pub fn new(
        universe: &'u mut Universe<'p>,
        topology: &'u Topology,
        stock: Stock<'g>,
        selectors: &mut Selectors<'p>,
        counters: &HostCounters,
    ) -> Self {
        let budgets = universe.problem.pools.iter().map(Budget::of).collect();
        let rules: Vec<_> = universe
            .problem
            .daemons
            .iter()
            .map(|d| counters.daemon(&d.class, selectors))
            .collect();
        let mut daemon_hosts: Vec<HostState> = Vec::new();
        for column in 0..universe.columns.len() {
            let set = universe.daemon_set(column);
            if daemon_hosts.len() <= set {
                daemon_hosts.resize_with(set + 1, HostState::default);
            }
            if daemon_hosts[set].counts.is_empty() && daemon_hosts[set].caps.is_empty() {
                for daemon in universe.daemons(column) {
                    daemon_hosts[set].add(&rules[*daemon]);
                }
            }
        }
        // About what compute costs on EC2, in micro-USD per hour: only directions matter until there are dual prices.
        let mut reference = vec![25.0, 3e3 / 1_073_741_824.0, 10.0, 0.0];
        reference.resize(universe.dims.len(), 1000.0);
        Self {
            universe,
            topology,
            stock,
            bought: Vec::new(),
            budgets,
            daemon_hosts,
            reference,
            bound: None,
            fills: 0,
        }
    }

    pub fn daemon_host(&self, column: usize) -> &HostState {
        &self.daemon_hosts[self.universe.daemon_set(column)]
    }

    fn group(&self, place: usize) -> &'g Group {
        &self.stock.groups[self.stock.places[place].sample]
    }

    /// Fills the nodes that exist, in their order. Returns what each got.
    pub fn use_existing(
        &mut self,
        nodes: &mut [Existing<'p>],
        active: &dyn Fn(usize) -> bool,
    ) -> Vec<(usize, Content)> {
        let mut out = Vec::new();
        let mut admitted: std::collections::HashMap<(usize, usize), bool> = std::collections::HashMap::new();
        for (at, node) in nodes.iter_mut().enumerate() {
            if node.free[super::universe::PODS] <= 0 || self.stock.is_empty() {
                continue;
            }
            let accepts: Vec<bool> = (0..self.stock.places.len())
                .map(|place| {
                    active(place)
                        && *admitted
                            .entry((place, node.kind))
                            .or_insert_with(|| admits(&self.group(place).class, node.state))
                        && self.stock.places[place]
                            .pins
                            .iter()
                            .all(|(key, domain)| self.topology.in_domain(node, *key, *domain))
                })
                .collect();
            let buckets = self.stock.open_buckets(|place| accepts[place]);
            if buckets.is_empty() {
                continue;
            }
            let bin = Bin {
                room: &node.free,
                host: &node.host,
                content: &[],
            };
            self.fills += 1;
            let content = self.stock.fill(&bin, &self.reference, &buckets, None, &[]);
            if content.is_empty() {
                continue;
            }
            self.stock.take(&content, 1);
            for (item, count) in &content {
                for _ in 0..*count {
                    node.host.add(self.stock.host(*item));
                }
                for (free, need) in node.free.iter_mut().zip(self.stock.need(*item)) {
                    *free -= need * i64::try_from(*count).unwrap_or(i64::MAX);
                }
            }
            out.push((at, content));
        }
        out
    }

    /// The columns of each place at a preference level, within a tier; `None` where it has none.
    pub fn round(&mut self, level: usize, tier: &Bits, active: &dyn Fn(usize) -> bool) -> Round {
        let mut signature = Vec::with_capacity(self.stock.places.len());
        let mut shapes = Vec::with_capacity(self.stock.places.len());
        let mut cache: std::collections::HashMap<usize, Bits> = std::collections::HashMap::new();
        for place in 0..self.stock.places.len() {
            let of_level = self.stock.places[place]
                .levels
                .get(level)
                .copied()
                .filter(|_| active(place));
            let id = of_level.and_then(|id| {
                let mut bits = self.universe.signatures[id].bits.clone();
                bits.and(tier);
                (!bits.is_empty()).then(|| self.universe.signature(bits))
            });
            signature.push(id);
            shapes.push(id.map(|id| {
                cache
                    .entry(id)
                    .or_insert_with(|| {
                        let mut shapes = Bits::empty(self.universe.shapes.len());
                        for column in self.universe.signatures[id].bits.iter() {
                            shapes.insert(self.universe.columns[column].shape);
                        }
                        shapes
                    })
                    .clone()
            }));
        }
        Round {
            dead: vec![false; signature.len()],
            signature,
            shapes,
        }
    }

    /// A round in which each place may use everything that its requirements allow.
    pub fn widest(&mut self, tier: &Bits) -> Round {
        for place in &mut self.stock.places {
            place.levels.reverse();
        }
        let round = self.round(0, tier, &|_| true);
        for place in &mut self.stock.places {
            place.levels.reverse();
        }
        round
    }

    /// Dual prices of what is left; they become the stock's prices.
    pub fn price(&mut self, round: &Round) -> Option<Prices> {
        let dims = self.universe.dims.len();
        let mut amounts: Vec<Option<Vec<i64>>> = vec![None; self.stock.places.len()];
        for at in 0..self.stock.items.len() {
            let (left, place) = (self.stock.items[at].left, self.stock.items[at].place);
            if left == 0 || round.dead[place] || round.signature[place].is_none() {
                continue;
            }
            let amount = amounts[place].get_or_insert_with(|| vec![0; dims]);
            for (sum, need) in amount.iter_mut().zip(self.stock.need(at)) {
                *sum += need * i64::try_from(left).unwrap_or(i64::MAX);
            }
        }
        let wanted: Vec<usize> = (0..amounts.len()).filter(|p| amounts[*p].is_some()).collect();
        let demands: Vec<(Bits, Vec<i64>)> = wanted
            .iter()
            .filter_map(|p| Some((round.shapes[*p].clone()?, amounts[*p].clone()?)))
            .collect();
        let supplies: Vec<Supply<'_>> = self
            .universe
            .shapes
            .iter()
            .map(|shape| Supply {
                room: self.universe.room(shape.first),
                price: (shape.first..shape.end)
                    .map(|c| self.universe.columns[c].price)
                    .min()
                    .unwrap_or(0),
            })
            .collect();
        let found = prices(&demands, &supplies, dims)?;
        for (place, demand) in wanted.iter().zip(&found.demand) {
            self.stock.set_prices(*place, demand.clone());
        }
        Some(found)
    }

    /// Buys until nothing that the round can place is left, or limits end it.
    pub fn buy(&mut self, round: &mut Round) {
        let mut last: Option<(Prices, f64)> = None;
        loop {
            let remaining = self.remaining(round);
            let Some(seed) = self.seed(round) else { return };
            if last.as_ref().is_none_or(|(_, then)| remaining < then * 0.93) {
                let Some(found) = self.price(round) else { return };
                let now = self.remaining(round);
                last = Some((found, now));
            }
            let Some((found, _)) = &last else { return };
            let found = found.clone();
            let remaining = self.remaining(round);
            match self.best_purchase(round, seed, &found, remaining) {
                Some(bought) => {
                    let capacity = self.universe.instance_type(bought.column).capacity.clone();
                    let most = bought
                        .content
                        .iter()
                        .map(|(item, count)| self.stock.items[*item].left / count)
                        .min()
                        .unwrap_or(0);
                    let pool = self.universe.pool(bought.column);
                    let copies = self.budgets[pool].copies(&capacity, most);
                    self.budgets[pool].spend(&capacity, copies);
                    self.stock.take(&bought.content, copies);
                    self.bought.extend(std::iter::repeat_n(bought, copies));
                }
                None => round.dead[seed] = true,
            }
        }
    }

    fn open(&self, round: &Round, item: usize) -> bool {
        let item = &self.stock.items[item];
        item.left > 0 && !round.dead[item.place] && round.signature[item.place].is_some()
    }

    fn remaining(&self, round: &Round) -> f64 {
        (0..self.stock.items.len())
            .filter(|i| self.open(round, *i))
            .map(|i| self.stock.worth(i) * float(self.stock.items[i].left))
            .sum()
    }

    /// The place that has the fewest columns, and of those the most left: what is flexible fills up what is not.
    fn seed(&self, round: &Round) -> Option<usize> {
        let mut worths: Vec<f64> = vec![-1.0; self.stock.places.len()];
        for i in (0..self.stock.items.len()).filter(|i| self.open(round, *i)) {
            let total = &mut worths[self.stock.items[i].place];
            *total = total.max(0.0) + self.stock.worth(i) * float(self.stock.items[i].left);
        }
        (0..worths.len()).filter(|p| worths[*p] >= 0.0).min_by(|a, b| {
            let columns = |p: &usize| round.signature[*p].map_or(0, |id| self.universe.signatures[id].bits.len());
            columns(a)
                .cmp(&columns(b))
                .then(worths[*b].total_cmp(&worths[*a]))
                .then(a.cmp(b))
        })
    }

    fn best_purchase(&mut self, round: &Round, seed: usize, found: &Prices, remaining: f64) -> Option<Bought> {
        let signature = round.signature[seed]?;
        let largest = (0..self.stock.items.len())
            .filter(|i| self.stock.items[*i].place == seed && self.open(round, *i))
            .max_by(|a, b| self.stock.worth(*a).total_cmp(&self.stock.worth(*b)).then(b.cmp(a)))?;
        let (nodes, critical) = self.stock.nodes_needed();
        let cap = if nodes > 1 {
            remaining / float(nodes) * 1.15
        } else {
            f64::INFINITY
        };
        let candidates = self.candidates(signature, self.stock.need(largest), found, cap.min(remaining * 1.3));
        let mut best: Option<(f64, i64, Bought)> = None;
        for column in candidates {
            let buckets = self.stock.open_buckets(|place| {
                !round.dead[place]
                    && round.signature[place].is_some_and(|id| self.universe.signatures[id].bits.contains(column))
            });
            let host = self.daemon_hosts[self.universe.daemon_set(column)].clone();
            let shape = self.universe.columns[column].shape;
            let bin = Bin {
                room: self.universe.room(column),
                host: &host,
                content: &[],
            };
            self.fills += 1;
            let content = self
                .stock
                .fill(&bin, &found.supply[shape], &buckets, Some(seed), &critical);
            if content.is_empty() {
                continue;
            }
            let price = self.universe.columns[column].price;
            let value = self.stock.content_worth(&content) / real(price.max(1));
            if best
                .as_ref()
                .is_none_or(|(have, cost, _)| value > *have || (value >= *have && price < *cost))
            {
                best = Some((value, price, Bought { column, content }));
            }
        }
        best.map(|(_, _, bought)| bought)
    }

    /// Columns worth trying: those of each price band that give most for their price, within limits, that hold `need`.
    fn candidates(&self, signature: usize, need: &[i64], found: &Prices, cap: f64) -> Vec<usize> {
        const PER_BAND: usize = 3;
        let mut rated: Vec<(u32, f64, i64, usize)> = Vec::new();
        let mut last_shape = usize::MAX;
        for column in self.universe.signatures[signature].bits.iter() {
            let price = self.universe.columns[column].price;
            let shape = self.universe.columns[column].shape;
            let room = self.universe.room(column);
            if !fits(need, room) {
                continue;
            }
            let capacity = &self.universe.instance_type(column).capacity;
            if !self.budgets[self.universe.pool(column)].allows(capacity) {
                continue;
            }
            let value = worth(room, &found.supply[shape]) / real(price.max(1));
            let band = 64 - price.leading_zeros();
            let entry = (band, value, price, column);
            if shape == last_shape {
                // Columns of a shape differ in zone and capacity type: keep the cheapest, the first of equals.
                if let Some(have) = rated.last_mut()
                    && price < have.2
                {
                    *have = entry;
                }
            } else {
                rated.push(entry);
                last_shape = shape;
            }
        }
        let cheapest = rated.iter().map(|(_, _, price, _)| *price).min();
        let within = |price: i64| real(price) <= cap || Some(price) == cheapest;
        rated.retain(|(_, _, price, _)| within(*price));
        rated.sort_by(|a, b| {
            a.0.cmp(&b.0)
                .then(b.1.total_cmp(&a.1))
                .then(a.2.cmp(&b.2))
                .then(a.3.cmp(&b.3))
        });
        let mut out = Vec::new();
        let mut band = (0, 0);
        for (of, _, _, column) in rated {
            band = if band.0 == of { (of, band.1 + 1) } else { (of, 1) };
            if band.1 <= PER_BAND {
                out.push(column);
            }
        }
        out
    }
}
