//! Buying: nodes are bought one kind at a time, each the best value at the dual prices of what is left.

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::{PODS, dot, fits, float, real};
use crate::planner::groups::existing::Existing;
use crate::planner::groups::group::Group;
use crate::planner::pricing::duals::{CoveringLp, Offer, Prices};
use crate::planner::state::budget::Budget;
use crate::planner::state::demand::{Bin, Content};
use crate::planner::state::plan_state::{PlanState, PurchasedNode, STRATEGIES, Strategy};

/// Share of its usual price that a free resource counts for when a node is filled.
const FLOOR: f64 = 0.3;

/// Share of the last best value that a favourite must still reach.
const GOOD: f64 = 0.985;
/// Most of what is left that copies of one node may take: more would leave a demand of another mix than was priced.
const PURCHASE: f64 = 0.05;

/// Sets of columns that prices tell apart while buying.
const PRICED_SETS: usize = 12;
/// Work up to which another strategy to buy is tried: large stocks are bought well in the first.
const ANOTHER_WAY: usize = 1_500_000;

/// How far prices that are bought by may be from those of the linear program, as a share.
const SLACK: f64 = 2e-3;
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
    column_set: Vec<Option<usize>>,
    /// Columns of each place.
    width: Vec<usize>,
    pub dead: Vec<bool>,
    /// Made when first priced: the places it was made for, and what they may buy.
    lp: Option<(Vec<usize>, CoveringLp)>,
}

impl Round {
    /// Whether the round serves a place at all.
    pub fn has(&self, place: usize) -> bool {
        self.column_set[place].is_some()
    }

    /// Prices on a column.
    fn prices_on<'x>(&self, found: &'x Prices, column: usize) -> &'x [f64] {
        self.lp.as_ref().map_or(&[], |(_, lp)| lp.of_column(found, column))
    }

    /// The columns of a place; `None` where it has none, or nothing more can be bought for it.
    pub fn column_set(&self, place: usize) -> Option<usize> {
        self.column_set[place].filter(|_| !self.dead[place])
    }
}

/// How often `each` goes into `worth`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn copies_of(worth: f64, each: f64) -> usize {
    (worth / each.max(1.0)) as usize
}

impl<'p, 'g> PlanState<'_, 'p, 'g> {
    fn group(&self, place: usize) -> &'g Group {
        &self.demand.groups[self.demand.places[place].sample]
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
            if node.free[PODS] <= 0 || self.demand.is_empty() {
                continue;
            }
            let accepts: Vec<bool> = (0..self.demand.places.len())
                .map(|place| {
                    active(place)
                        && *admitted
                            .entry((place, node.kind))
                            .or_insert_with(|| node.state.admits(&self.group(place).class))
                        && self.demand.places[place]
                            .pins
                            .iter()
                            .all(|(key, domain)| self.topology.in_domain(node, *key, *domain))
                })
                .collect();
            let buckets = self.demand.open_buckets(|place| accepts[place]);
            if buckets.is_empty() {
                continue;
            }
            let bin = Bin { room: &node.free, host: &node.host, content: &[] };
            let content = self.demand.fill(&bin, &self.reference, &buckets, None, &[], 0);
            if content.is_empty() {
                continue;
            }
            self.demand.take(&content, 1);
            for (item, count) in &content {
                for _ in 0..*count {
                    node.host.add(self.demand.host(*item));
                }
                for (free, need) in node.free.iter_mut().zip(self.demand.need(*item)) {
                    *free -= need * i64::try_from(*count).unwrap_or(i64::MAX);
                }
            }
            out.push((at, content));
        }
        out
    }

    /// The columns of each place at a preference level, within a tier; `None` where it has none.
    pub fn round(&mut self, level: usize, tier: &Bits, active: &dyn Fn(usize) -> bool) -> Round {
        let mut column_set = Vec::with_capacity(self.demand.places.len());
        for place in 0..self.demand.places.len() {
            let of_level = self.demand.places[place].levels.get(level).copied().filter(|_| active(place));
            let id = of_level.and_then(|id| {
                let mut bits = self.column_sets.sets[id].bits.clone();
                bits.and(tier);
                (!bits.is_empty()).then(|| self.column_sets.column_set(bits))
            });
            column_set.push(id);
        }
        let width = column_set.iter().map(|id| id.map_or(0, |id| self.column_sets.sets[id].bits.len())).collect();
        Round { dead: vec![false; column_set.len()], column_set, width, lp: None }
    }

    /// A round in which each place may use everything that its requirements allow.
    pub fn widest(&mut self, tier: &Bits) -> Round {
        for place in &mut self.demand.places {
            place.levels.reverse();
        }
        let round = self.round(0, tier, &|_| true);
        for place in &mut self.demand.places {
            place.levels.reverse();
        }
        round
    }

    /// What is left of each place that the round can serve: resources, then slots.
    fn demands(&self, round: &Round) -> Vec<(usize, Vec<i64>)> {
        let dims = self.column_sets.dims.len() + self.demand.slots.len();
        let mut amounts: Vec<Option<Vec<i64>>> = vec![None; self.demand.places.len()];
        for at in 0..self.demand.items.len() {
            let (left, place) = (self.demand.items[at].left, self.demand.items[at].place);
            if left == 0 || round.column_set(place).is_none() {
                continue;
            }
            self.demand.add_demand(at, amounts[place].get_or_insert_with(|| vec![0; dims]));
        }
        amounts.into_iter().enumerate().filter_map(|(place, amount)| Some((place, amount?))).collect()
    }

    /// Dual prices of what is left, zones told apart; they become the demand's prices.
    fn price(&mut self, round: &mut Round) -> Option<Prices> {
        let mut wanted = self.demands(round);
        if round.lp.is_none() {
            self.demand.choose_slots(false);
            wanted = self.demands(round);
            let sets: Vec<(&Bits, &[i64])> = wanted
                .iter()
                .filter_map(|(place, amount)| {
                    Some((&self.column_sets.sets[round.column_set(*place)?].bits, amount.as_slice()))
                })
                .collect();
            let lp = CoveringLp::new(
                self.column_sets,
                &sets,
                &self.demand.slot_caps(),
                PRICED_SETS,
                Offer {
                    price: |column: usize| self.column_sets.columns[column].price,
                    room: |_: usize, _: usize, room: i64| room,
                },
            );
            round.lp = Some((wanted.iter().map(|(place, _)| *place).collect(), lp));
        }
        let (places, lp) = round.lp.as_mut()?;
        let amounts =
            wanted.iter().filter_map(|(place, amount)| Some((places.binary_search(place).ok()?, amount.as_slice())));
        let found = lp.prices(amounts, SLACK)?;
        for (place, _) in &wanted {
            if let Ok(demand) = places.binary_search(place) {
                self.demand.set_prices(*place, lp.of_demand(&found, demand).to_vec());
            }
        }
        Some(found)
    }

    /// Items that no column of the round can hold: they must not stand in the strategy of others.
    pub fn hopeless(&self, round: &Round) -> Content {
        let items = self.demand.items.iter().enumerate().filter(|(_, item)| item.left > 0);
        items
            .filter(|(at, item)| {
                let Some(column_set) = round.column_set(item.place) else { return false };
                !self.column_sets.any_fits(column_set, self.demand.need(*at))
            })
            .map(|(at, item)| (at, item.left))
            .collect()
    }

    /// Buys for what is left: exactly where that is little, else in several ways of which the cheapest is kept.
    pub fn buy_best(&mut self, round: &mut Round) {
        if let Some((bought, budgets)) = self.buy_exactly(round) {
            for node in &bought {
                self.demand.take(&node.content, 1);
            }
            self.bought.extend(bought);
            self.budgets = budgets;
            return;
        }
        let from = self.bought.len();
        let (budgets, dead) = (self.budgets.clone(), round.dead.clone());
        let mut best: Option<(usize, i64, Vec<PurchasedNode>, Vec<Budget>, Vec<bool>, Strategy)> = None;
        let mut ways = STRATEGIES;
        if self.demand.is_rounded() {
            ways.swap(0, 1);
        }
        for strategy in ways {
            let tried = best.is_some() && self.demand.work > ANOTHER_WAY;
            if tried || (strategy.even && self.demand.slots.is_empty()) {
                continue;
            }
            self.strategy = strategy;
            self.buy(round);
            let left = self.demand.items.iter().map(|item| item.left).sum();
            let bought = self.bought.split_off(from);
            let cost = bought.iter().map(|node| self.column_sets.columns[node.column].price).sum();
            for node in &bought {
                self.demand.give_back(&node.content);
            }
            let spent = std::mem::replace(&mut self.budgets, budgets.clone());
            let ended = std::mem::replace(&mut round.dead, dead.clone());
            if best.as_ref().is_none_or(|(l, c, ..)| (left, cost) < (*l, *c)) {
                best = Some((left, cost, bought, spent, ended, strategy));
            }
        }
        if let Some((_, _, bought, spent, ended, strategy)) = best {
            for node in &bought {
                self.demand.take(&node.content, 1);
            }
            self.bought.extend(bought);
            self.budgets = spent;
            round.dead = ended;
            self.strategy = strategy;
        }
    }

    /// Buys until nothing that the round can place is left, or limits end it.
    pub fn buy(&mut self, round: &mut Round) {
        let mut aside = self.hopeless(round);
        self.demand.take(&aside, 1);
        self.buy_hopeful(round, &mut aside);
        self.demand.give_back(&aside);
    }

    /// Buys; what turns out to be out of reach is taken from the demand and put aside.
    fn buy_hopeful(&mut self, round: &mut Round, aside: &mut Content) {
        let mut priced: Option<Priced> = None;
        while let Some(seed) = self.seed(round, priced.as_ref()) {
            let stale = priced.as_ref().is_none_or(|p| p.remaining < p.solved_at * self.patience);
            if stale {
                let Some(found) = self.price(round) else { return };
                if self.first_prices.is_empty() {
                    self.first_prices = self.demand.prices().to_vec();
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
                let capacity = self.column_sets.instance_type(bought.column).capacity.clone();
                let most =
                    bought.content.iter().map(|(item, count)| self.demand.items[*item].left / count).min().unwrap_or(0);
                let pool = self.column_sets.pool(bought.column);
                let copies = copies_of(now.remaining * PURCHASE, self.demand.content_worth(&bought.content));
                let most = most.min(copies.max(1));
                let copies = self.budgets[pool].copies(&capacity, most);
                self.budgets[pool].spend(&capacity, copies);
                for (item, count) in &bought.content {
                    let worth = self.demand.worth(*item) * float(count * copies);
                    now.worth_of[self.demand.items[*item].place] -= worth;
                    now.remaining -= worth;
                }
                self.demand.take(&bought.content, copies);
                self.bought.extend(std::iter::repeat_n(bought, copies));
            } else if let Some(item) = self.demand.largest(seed) {
                let left = self.demand.items[item].left;
                let worth = self.demand.worth(item) * float(left);
                now.worth_of[seed] -= worth;
                now.remaining -= worth;
                self.demand.take(&[(item, left)], 1);
                aside.push((item, left));
            } else {
                now.remaining -= now.worth_of[seed];
                round.dead[seed] = true;
            }
            priced = Some(now);
        }
    }

    fn open(&self, round: &Round, item: usize) -> bool {
        let item = &self.demand.items[item];
        item.left > 0 && !round.dead[item.place] && round.column_set[item.place].is_some()
    }

    fn worth_of(&self, round: &Round) -> Vec<f64> {
        let mut out = vec![0.0; self.demand.places.len()];
        for i in (0..self.demand.items.len()).filter(|i| self.open(round, *i)) {
            out[self.demand.items[i].place] += self.demand.worth(i) * float(self.demand.items[i].left);
        }
        out
    }

    fn remaining(&self, round: &Round) -> f64 {
        self.worth_of(round).iter().sum()
    }

    /// The place that has the fewest columns, and of those the most left: what is flexible fills up what is not.
    fn seed(&self, round: &Round, priced: Option<&Priced>) -> Option<usize> {
        let open = |p: &usize| self.demand.left_of(*p) > 0 && !round.dead[*p] && round.column_set[*p].is_some();
        (0..self.demand.places.len()).filter(open).min_by(|a, b| {
            let worth = |p: &usize| priced.map_or(0.0, |priced| priced.worth_of[*p]);
            round.width[*a].cmp(&round.width[*b]).then(worth(b).total_cmp(&worth(a))).then(a.cmp(b))
        })
    }

    /// The purchase that gives most for its price. The favourites of the last full comparison are tried alone while they
    /// stay as good.
    fn best_purchase(&mut self, round: &Round, priced: &mut Priced) -> Option<PurchasedNode> {
        let column_set = round.column_set[priced.seed]?;
        let largest = self.demand.largest(priced.seed)?;
        let need = self.demand.need(largest);
        let critical = self.demand.critical();
        let nodes = if self.strategy.even { self.demand.slot_nodes() } else { 0 };
        let cap = if nodes > 1 { priced.remaining / float(nodes) * 1.15 } else { priced.remaining * 1.3 };
        if !priced.favourites.is_empty() {
            for column in std::mem::take(&mut priced.favourites) {
                let holds = fits(need, self.column_sets.room(column))
                    && real(self.column_sets.columns[column].price) <= cap
                    && self.budgets[self.column_sets.pool(column)]
                        .allows(&self.column_sets.instance_type(column).capacity);
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
        let candidates = self.candidates(round, column_set, need, &priced.found, cap);
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
    ) -> Vec<(f64, i64, PurchasedNode)> {
        let mut out: Vec<(f64, i64, PurchasedNode)> = Vec::new();
        let mut best = 0.0;
        for (column, at_most) in candidates.iter().copied() {
            if at_most <= best {
                break;
            }
            // Asked once for a place, not for each of its buckets.
            let accepted: Vec<bool> = (round.column_set.iter().zip(&round.dead))
                .map(|(column_set, dead)| {
                    !dead && column_set.is_some_and(|id| self.column_sets.sets[id].bits.contains(column))
                })
                .collect();
            let buckets = self.demand.open_buckets(|place| accepted[place]);
            let host = self.daemon_hosts[self.column_sets.daemon_set(column)].clone();
            let bin = Bin { room: self.column_sets.room(column), host: &host, content: &[] };
            let weights = self.weights(round.prices_on(&priced.found, column));
            let mut content =
                self.demand.fill(&bin, &weights, &buckets, Some(priced.seed), critical, self.strategy.power);
            while !content.is_empty() && !self.min_values_hold(column, &content) {
                content.pop();
            }
            if content.is_empty() {
                continue;
            }
            let price = self.column_sets.columns[column].price;
            let value = self.demand.content_worth(&content) / real(price.max(1));
            best = value.max(best);
            out.push((value, price, PurchasedNode { column, content }));
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
    fn candidates(
        &self,
        round: &Round,
        column_set: usize,
        need: &[i64],
        found: &Prices,
        cap: f64,
    ) -> Vec<(usize, f64)> {
        const PER_BAND: usize = 3;
        let mut rated: Vec<(f64, i64, usize)> = Vec::new();
        let mut last_shape = usize::MAX;
        for column in self.column_sets.sets[column_set].bits.iter() {
            let price = self.column_sets.columns[column].price;
            let shape = self.column_sets.columns[column].shape;
            // Columns of a shape differ in zone and capacity type: keep the cheapest, the first of equals.
            let of_shape = rated.last().filter(|_| shape == last_shape).map(|(_, price, _)| *price);
            if of_shape.is_some_and(|cheapest| price >= cheapest) {
                continue;
            }
            let room = self.column_sets.room(column);
            if !fits(need, room) {
                continue;
            }
            let capacity = &self.column_sets.instance_type(column).capacity;
            if !self.budgets[self.column_sets.pool(column)].allows(capacity) {
                continue;
            }
            let paid = round.prices_on(found, column);
            let value = (dot(room, paid) + self.demand.slots_worth(paid)) / real(price.max(1));
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
