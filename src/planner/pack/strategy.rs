//! Buying: nodes are bought one kind at a time, each the best value at the dual prices of what is left.

use crate::model::resources::Resources;
use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::{PODS, fits};
use crate::planner::columns::sets::Universe;
use crate::planner::groups::group::{Group, HostCounters};
use crate::planner::groups::selectors::Selectors;
use crate::planner::groups::topology::Topology;
use crate::planner::pack::budget::Budget;
use crate::planner::pack::demand::{Bin, Content, Stock, float, real, worth};
use crate::planner::pack::existing::{Existing, HostState, admits};
use crate::planner::pricing::duals::{Market, Offer, Prices};

/// A node that is bought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bought {
    pub column: usize,
    pub content: Content,
}

/// Everything a plan is made with.
pub(crate) struct Packer<'u, 'p, 'g> {
    pub universe: &'u mut Universe<'p>,
    pub topology: &'u Topology,
    pub stock: Stock<'g>,
    pub bought: Vec<Bought>,
    pub budgets: Vec<Budget>,
    /// The most of each resource that anything offered has, by pool.
    pub largest: Vec<Resources>,
    /// Host state of a new node, by set of daemons.
    daemon_hosts: Vec<HostState>,
    /// Prices of the first demand, for right-sizing and existing nodes.
    pub reference: Vec<f64>,
    pub bound: Option<f64>,
    /// Counters that a running pod raises.
    pub running_counters: std::collections::BTreeSet<u32>,
    /// Share of its worth at which what is left is priced anew.
    pub patience: f64,
    pub way: Way,
    /// Prices by place when the round began.
    pub first_prices: Vec<Vec<f64>>,
}

/// Share of its usual price that a free resource counts for when a node is filled.
const FLOOR: f64 = 0.3;

/// Share of its worth at which what is left is priced anew.
pub(crate) const PATIENCE: f64 = 0.88;
/// Share of the last best value that a favourite must still reach.
const GOOD: f64 = 0.985;
/// Most of what is left that copies of one node may take: more would leave a stock of another mix than was priced.
const PURCHASE: f64 = 0.05;

/// Sets of columns that prices tell apart while buying.
const PRICED_SETS: usize = 12;
/// Work up to which another way to buy is tried: large stocks are bought well in the first.
const ANOTHER_WAY: usize = 1_500_000;

/// How far prices that are bought by may be from those of the linear program, as a share.
const SLACK: f64 = 2e-3;
/// A way to buy. Nothing tells beforehand which serves a stock best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    /// How much the direction counts against the size when a node is filled: with few sizes it keeps the mix, with many
    /// sizes the largest first is best.
    pub power: i32,
    /// Nodes no dearer than what is left is worth for each node that slots make necessary.
    pub even: bool,
}

/// The ways to buy.
pub(crate) const WAYS: [Way; 3] =
    [Way { power: 2, even: false }, Way { power: 0, even: false }, Way { power: 0, even: true }];

/// Prices, and what is left at these prices.
struct Priced {
    found: Prices,
    remaining: f64,
    solved_at: f64,
    worth_of: Vec<f64>,
    seed: usize,
    favourites: Vec<usize>,
    best: f64,
}

/// What is bought in one round: the columns each place may use.
pub(crate) struct Round {
    signature: Vec<Option<usize>>,
    /// Columns of each place.
    width: Vec<usize>,
    pub dead: Vec<bool>,
    /// Made when first priced: the places it was made for, and what they may buy.
    market: Option<(Vec<usize>, Market)>,
}

impl Round {
    /// Whether the round serves a place at all.
    pub fn has(&self, place: usize) -> bool {
        self.signature[place].is_some()
    }

    /// Prices on a column.
    fn prices_on<'x>(&self, found: &'x Prices, column: usize) -> &'x [f64] {
        self.market.as_ref().map_or(&[], |(_, market)| market.of_column(found, column))
    }

    /// The columns of a place; `None` where it has none, or nothing more can be bought for it.
    pub fn signature(&self, place: usize) -> Option<usize> {
        self.signature[place].filter(|_| !self.dead[place])
    }
}

/// How often `each` goes into `worth`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn copies_of(worth: f64, each: f64) -> usize {
    (worth / each.max(1.0)) as usize
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
        let mut largest = vec![Resources::default(); universe.problem.pools.len()];
        for shape in &universe.shapes {
            largest[universe.pool(shape.first)].raise_to(&shape.instance_type.capacity);
        }
        let rules: Vec<_> = universe.problem.daemons.iter().map(|d| counters.daemon(&d.class, selectors)).collect();
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
        (0..reference.len()).filter(|dim| universe.dims.is_attach(*dim)).for_each(|dim| reference[dim] = 0.0);
        Self {
            universe,
            topology,
            stock,
            bought: Vec::new(),
            budgets,
            largest,
            daemon_hosts,
            reference,
            bound: None,
            running_counters: std::collections::BTreeSet::new(),
            way: WAYS[0],
            patience: PATIENCE,
            first_prices: Vec::new(),
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
            if node.free[PODS] <= 0 || self.stock.is_empty() {
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
            let bin = Bin { room: &node.free, host: &node.host, content: &[] };
            let content = self.stock.fill(&bin, &self.reference, &buckets, None, &[], 0);
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
        for place in 0..self.stock.places.len() {
            let of_level = self.stock.places[place].levels.get(level).copied().filter(|_| active(place));
            let id = of_level.and_then(|id| {
                let mut bits = self.universe.signatures[id].bits.clone();
                bits.and(tier);
                (!bits.is_empty()).then(|| self.universe.signature(bits))
            });
            signature.push(id);
        }
        let width = signature.iter().map(|id| id.map_or(0, |id| self.universe.signatures[id].bits.len())).collect();
        Round { dead: vec![false; signature.len()], signature, width, market: None }
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

    /// What is left of each place that the round can serve: resources, then slots.
    fn demands(&self, round: &Round) -> Vec<(usize, Vec<i64>)> {
        let dims = self.universe.dims.len() + self.stock.slots.len();
        let mut amounts: Vec<Option<Vec<i64>>> = vec![None; self.stock.places.len()];
        for at in 0..self.stock.items.len() {
            let (left, place) = (self.stock.items[at].left, self.stock.items[at].place);
            if left == 0 || round.signature(place).is_none() {
                continue;
            }
            self.stock.add_demand(at, amounts[place].get_or_insert_with(|| vec![0; dims]));
        }
        amounts.into_iter().enumerate().filter_map(|(place, amount)| Some((place, amount?))).collect()
    }

    /// Dual prices of what is left, zones told apart; they become the stock's prices.
    fn price(&mut self, round: &mut Round) -> Option<Prices> {
        let mut wanted = self.demands(round);
        if round.market.is_none() {
            self.stock.choose_slots(false);
            wanted = self.demands(round);
            let sets: Vec<(&Bits, &[i64])> = wanted
                .iter()
                .filter_map(|(place, amount)| {
                    Some((&self.universe.signatures[round.signature(*place)?].bits, amount.as_slice()))
                })
                .collect();
            let market = Market::new(
                self.universe,
                &sets,
                &self.stock.slot_caps(),
                PRICED_SETS,
                Offer {
                    price: |column: usize| self.universe.columns[column].price,
                    room: |_: usize, _: usize, room: i64| room,
                },
            );
            round.market = Some((wanted.iter().map(|(place, _)| *place).collect(), market));
        }
        let (places, market) = round.market.as_mut()?;
        let amounts =
            wanted.iter().filter_map(|(place, amount)| Some((places.binary_search(place).ok()?, amount.as_slice())));
        let found = market.prices(amounts, SLACK)?;
        for (place, _) in &wanted {
            if let Ok(demand) = places.binary_search(place) {
                self.stock.set_prices(*place, market.of_demand(&found, demand).to_vec());
            }
        }
        Some(found)
    }

    /// Items that no column of the round can hold: they must not stand in the way of others.
    pub fn hopeless(&self, round: &Round) -> Content {
        let items = self.stock.items.iter().enumerate().filter(|(_, item)| item.left > 0);
        items
            .filter(|(at, item)| {
                let Some(signature) = round.signature(item.place) else { return false };
                !self.universe.any_fits(signature, self.stock.need(*at))
            })
            .map(|(at, item)| (at, item.left))
            .collect()
    }

    /// Buys for what is left: exactly where that is little, else in several ways of which the cheapest is kept.
    pub fn buy_best(&mut self, round: &mut Round) {
        if let Some((bought, budgets)) = self.buy_exactly(round) {
            for node in &bought {
                self.stock.take(&node.content, 1);
            }
            self.bought.extend(bought);
            self.budgets = budgets;
            return;
        }
        let from = self.bought.len();
        let (budgets, dead) = (self.budgets.clone(), round.dead.clone());
        let mut best: Option<(usize, i64, Vec<Bought>, Vec<Budget>, Vec<bool>, Way)> = None;
        let mut ways = WAYS;
        if self.stock.is_rounded() {
            ways.swap(0, 1);
        }
        for way in ways {
            let tried = best.is_some() && self.stock.work > ANOTHER_WAY;
            if tried || (way.even && self.stock.slots.is_empty()) {
                continue;
            }
            self.way = way;
            self.buy(round);
            let left = self.stock.items.iter().map(|item| item.left).sum();
            let bought = self.bought.split_off(from);
            let cost = bought.iter().map(|node| self.universe.columns[node.column].price).sum();
            for node in &bought {
                self.stock.give_back(&node.content);
            }
            let spent = std::mem::replace(&mut self.budgets, budgets.clone());
            let ended = std::mem::replace(&mut round.dead, dead.clone());
            if best.as_ref().is_none_or(|(l, c, ..)| (left, cost) < (*l, *c)) {
                best = Some((left, cost, bought, spent, ended, way));
            }
        }
        if let Some((_, _, bought, spent, ended, way)) = best {
            for node in &bought {
                self.stock.take(&node.content, 1);
            }
            self.bought.extend(bought);
            self.budgets = spent;
            round.dead = ended;
            self.way = way;
        }
    }

    /// Buys until nothing that the round can place is left, or limits end it.
    pub fn buy(&mut self, round: &mut Round) {
        let mut aside = self.hopeless(round);
        self.stock.take(&aside, 1);
        self.buy_hopeful(round, &mut aside);
        self.stock.give_back(&aside);
    }

    /// Buys; what turns out to be out of reach is taken from the stock and put aside.
    fn buy_hopeful(&mut self, round: &mut Round, aside: &mut Content) {
        let mut priced: Option<Priced> = None;
        while let Some(seed) = self.seed(round, priced.as_ref()) {
            let stale = priced.as_ref().is_none_or(|p| p.remaining < p.solved_at * self.patience);
            if stale {
                let Some(found) = self.price(round) else { return };
                if self.first_prices.is_empty() {
                    self.first_prices = self.stock.prices().to_vec();
                }
                let remaining = self.remaining(round);
                let worth_of = self.worth_of(round);
                priced = Some(Priced {
                    found,
                    remaining,
                    solved_at: remaining,
                    worth_of,
                    seed,
                    favourites: Vec::new(),
                    best: 0.0,
                });
                continue;
            }
            let Some(mut now) = priced.take() else { return };
            if now.seed != seed {
                now.seed = seed;
                now.favourites.clear();
            }
            if let Some(bought) = self.best_purchase(round, &mut now) {
                let capacity = self.universe.instance_type(bought.column).capacity.clone();
                let most =
                    bought.content.iter().map(|(item, count)| self.stock.items[*item].left / count).min().unwrap_or(0);
                let pool = self.universe.pool(bought.column);
                let copies = copies_of(now.remaining * PURCHASE, self.stock.content_worth(&bought.content));
                let most = most.min(copies.max(1));
                let copies = self.budgets[pool].copies(&capacity, most);
                self.budgets[pool].spend(&capacity, copies);
                for (item, count) in &bought.content {
                    let worth = self.stock.worth(*item) * float(count * copies);
                    now.worth_of[self.stock.items[*item].place] -= worth;
                    now.remaining -= worth;
                }
                self.stock.take(&bought.content, copies);
                self.bought.extend(std::iter::repeat_n(bought, copies));
            } else if let Some(item) = self.stock.largest(seed) {
                let left = self.stock.items[item].left;
                let worth = self.stock.worth(item) * float(left);
                now.worth_of[seed] -= worth;
                now.remaining -= worth;
                self.stock.take(&[(item, left)], 1);
                aside.push((item, left));
            } else {
                now.remaining -= now.worth_of[seed];
                round.dead[seed] = true;
            }
            priced = Some(now);
        }
    }

    fn open(&self, round: &Round, item: usize) -> bool {
        let item = &self.stock.items[item];
        item.left > 0 && !round.dead[item.place] && round.signature[item.place].is_some()
    }

    fn worth_of(&self, round: &Round) -> Vec<f64> {
        let mut out = vec![0.0; self.stock.places.len()];
        for i in (0..self.stock.items.len()).filter(|i| self.open(round, *i)) {
            out[self.stock.items[i].place] += self.stock.worth(i) * float(self.stock.items[i].left);
        }
        out
    }

    fn remaining(&self, round: &Round) -> f64 {
        self.worth_of(round).iter().sum()
    }

    /// The place that has the fewest columns, and of those the most left: what is flexible fills up what is not.
    fn seed(&self, round: &Round, priced: Option<&Priced>) -> Option<usize> {
        let open = |p: &usize| self.stock.left_of(*p) > 0 && !round.dead[*p] && round.signature[*p].is_some();
        (0..self.stock.places.len()).filter(open).min_by(|a, b| {
            let worth = |p: &usize| priced.map_or(0.0, |priced| priced.worth_of[*p]);
            round.width[*a].cmp(&round.width[*b]).then(worth(b).total_cmp(&worth(a))).then(a.cmp(b))
        })
    }

    /// The purchase that gives most for its price. The favourites of the last full comparison are tried alone while they
    /// stay as good.
    fn best_purchase(&mut self, round: &Round, priced: &mut Priced) -> Option<Bought> {
        let signature = round.signature[priced.seed]?;
        let largest = self.stock.largest(priced.seed)?;
        let need = self.stock.need(largest);
        let critical = self.stock.critical();
        let nodes = if self.way.even { self.stock.slot_nodes() } else { 0 };
        let cap = if nodes > 1 { priced.remaining / float(nodes) * 1.15 } else { priced.remaining * 1.3 };
        if !priced.favourites.is_empty() {
            for column in std::mem::take(&mut priced.favourites) {
                let holds = fits(need, self.universe.room(column))
                    && real(self.universe.columns[column].price) <= cap
                    && self.budgets[self.universe.pool(column)].allows(&self.universe.instance_type(column).capacity);
                if !holds {
                    continue;
                }
                priced.favourites.push(column);
                let tried = self.compare(round, priced, &[(column, f64::INFINITY)], &critical);
                if let Some((value, _, bought)) = tried.into_iter().next()
                    && value >= priced.best * GOOD
                {
                    return Some(bought);
                }
            }
        }
        let candidates = self.candidates(round, signature, need, &priced.found, cap);
        let tried = self.compare(round, priced, &candidates, &critical);
        priced.favourites = tried.iter().take(4).map(|(_, _, bought)| bought.column).collect();
        let (value, _, bought) = tried.into_iter().next()?;
        priced.best = value;
        Some(bought)
    }

    /// Fills each candidate while it may still be better than the best so far; best value for its price first.
    fn compare(
        &mut self,
        round: &Round,
        priced: &Priced,
        candidates: &[(usize, f64)],
        critical: &[u32],
    ) -> Vec<(f64, i64, Bought)> {
        let mut out: Vec<(f64, i64, Bought)> = Vec::new();
        let mut best = 0.0;
        for (column, at_most) in candidates.iter().copied() {
            if at_most <= best {
                break;
            }
            // Asked once for a place, not for each of its buckets.
            let accepted: Vec<bool> = (round.signature.iter().zip(&round.dead))
                .map(|(signature, dead)| {
                    !dead && signature.is_some_and(|id| self.universe.signatures[id].bits.contains(column))
                })
                .collect();
            let buckets = self.stock.open_buckets(|place| accepted[place]);
            let host = self.daemon_hosts[self.universe.daemon_set(column)].clone();
            let bin = Bin { room: self.universe.room(column), host: &host, content: &[] };
            let weights = self.weights(round.prices_on(&priced.found, column));
            let mut content = self.stock.fill(&bin, &weights, &buckets, Some(priced.seed), critical, self.way.power);
            while !content.is_empty() && !self.min_values_hold(column, &content) {
                content.pop();
            }
            if content.is_empty() {
                continue;
            }
            let price = self.universe.columns[column].price;
            let value = self.stock.content_worth(&content) / real(price.max(1));
            best = value.max(best);
            out.push((value, price, Bought { column, content }));
        }
        out.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.column.cmp(&b.2.column)));
        out
    }

    /// Prices to fill by: a resource that is free now still counts a little, so that what uses it isn't left for last.
    fn weights(&self, prices: &[f64]) -> Vec<f64> {
        prices.iter().zip(&self.reference).map(|(p, reference)| p.max(reference * FLOOR)).collect()
    }

    /// Columns worth trying, each with the most that its content can be worth for its price: those of each price band that
    /// could give most, within limits, that hold `need`.
    fn candidates(&self, round: &Round, signature: usize, need: &[i64], found: &Prices, cap: f64) -> Vec<(usize, f64)> {
        const PER_BAND: usize = 3;
        let mut rated: Vec<(f64, i64, usize)> = Vec::new();
        let mut last_shape = usize::MAX;
        for column in self.universe.signatures[signature].bits.iter() {
            let price = self.universe.columns[column].price;
            let shape = self.universe.columns[column].shape;
            // Columns of a shape differ in zone and capacity type: keep the cheapest, the first of equals.
            let of_shape = rated.last().filter(|_| shape == last_shape).map(|(_, price, _)| *price);
            if of_shape.is_some_and(|cheapest| price >= cheapest) {
                continue;
            }
            let room = self.universe.room(column);
            if !fits(need, room) {
                continue;
            }
            let capacity = &self.universe.instance_type(column).capacity;
            if !self.budgets[self.universe.pool(column)].allows(capacity) {
                continue;
            }
            let paid = round.prices_on(found, column);
            let value = (worth(room, paid) + self.stock.slots_worth(paid)) / real(price.max(1));
            if of_shape.is_some() {
                rated.pop();
            }
            rated.push((value, price, column));
            last_shape = shape;
        }
        let cheapest = rated.iter().map(|(_, price, _)| *price).min();
        let mut bands: Vec<Vec<(f64, i64, usize)>> = vec![Vec::new(); 65];
        for entry in rated.into_iter().filter(|(_, price, _)| real(*price) <= cap || Some(*price) == cheapest) {
            let band = &mut bands[(64 - entry.1.leading_zeros()) as usize];
            let better = |a: &(f64, i64, usize), b: &(f64, i64, usize)| {
                b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)).is_lt()
            };
            let at = band.iter().position(|have| better(&entry, have)).unwrap_or(band.len());
            if at < PER_BAND {
                band.insert(at, entry);
                band.truncate(PER_BAND);
            }
        }
        let mut out: Vec<(usize, f64)> =
            bands.into_iter().flatten().map(|(value, _, column)| (column, value)).collect();
        // No content is worth more than the room it is in.
        out.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        out
    }
}
