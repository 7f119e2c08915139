//! Interned sets of columns: the node constraints of a class become a set over the [table](crate::columns::table).

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use stowage_model::labels;
use stowage_model::offering::OFFERING_LABELS;
use stowage_model::pod_class::{NodeTerm, PodClass, Toleration};
use stowage_model::requirement::ValueSet;

use crate::columns::bitset::Bits;
use crate::columns::daemons::DaemonNeed;
use crate::columns::dims::fits;
use crate::columns::table::{ColumnCache, ColumnTable, TableInputs};
use crate::input::problem::Problem;

/// An interned set of columns.
#[derive(Debug)]
pub(crate) struct ColumnSet {
    pub bits: Bits,
    /// Columns that stand for those of the set, ascending by price: no cheaper one has as much room.
    efficient: Vec<usize>,
    /// Pareto frontier of these: no other has as much room.
    frontier: Vec<usize>,
    /// Estimated price of a pod by its size, filled on demand.
    prices: HashMap<Vec<i64>, i64>,
}

/// All columns and the sets made of them.
pub(crate) struct ColumnSets<'p> {
    pub problem: &'p Problem,
    table: Arc<ColumnTable>,
    pub sets: Vec<ColumnSet>,
    by_bits: HashMap<Bits, usize>,
    /// Of the sets at two addresses; kept, so that no other set gets the address.
    intersections: HashMap<(usize, usize), (Bits, Bits, usize)>,
    requirement_bits: HashMap<(Arc<str>, ValueSet), Bits>,
    /// Shapes by their value of each label that a requirement has named; offering labels excepted.
    shapes_by_value: HashMap<Arc<str>, Vec<(Option<String>, Vec<usize>)>>,
    constraint_bits: HashMap<NodeConstraint, Bits>,
    tolerated_bits: HashMap<Vec<Toleration>, Bits>,
}

impl Deref for ColumnSets<'_> {
    type Target = ColumnTable;

    fn deref(&self) -> &ColumnTable {
        &self.table
    }
}

/// The parts of a class that decide which nodes it may use.
#[derive(Clone, PartialEq, Eq, Hash)]
struct NodeConstraint {
    terms: Vec<NodeTerm>,
    tolerations: Vec<Toleration>,
}

impl<'p> ColumnSets<'p> {
    pub fn new(problem: &'p Problem, cache: &ColumnCache) -> Self {
        let table = cache.column_table(TableInputs::of(problem), |inputs| {
            // Which columns a daemon runs on is evaluated on the table without daemons.
            let mut bare = Self::over(problem, Arc::new(ColumnTable::bare(problem, inputs)));
            let daemons = bare.daemons_of_problem();
            let mut table = Arc::into_inner(bare.table).expect("the table is not shared yet");
            table.complete(&daemons);
            table
        });
        Self::over(problem, table)
    }

    fn over(problem: &'p Problem, table: Arc<ColumnTable>) -> Self {
        Self {
            problem,
            table,
            sets: Vec::new(),
            by_bits: HashMap::new(),
            intersections: HashMap::new(),
            requirement_bits: HashMap::new(),
            shapes_by_value: HashMap::new(),
            constraint_bits: HashMap::new(),
            tolerated_bits: HashMap::new(),
        }
    }

    /// Requests of each DaemonSet's pods, and the columns they run on.
    fn daemons_of_problem(&mut self) -> Vec<DaemonNeed> {
        let daemons = self.problem.daemons.iter();
        daemons
            .map(|daemon| DaemonNeed {
                need: self.dims.dense(&daemon.class.requests.foreseeable()),
                priority: daemon.class.priority,
                columns: self.columns_for(&daemon.class),
            })
            .collect()
    }
}

impl ColumnSets<'_> {
    /// Interns a set of columns.
    pub fn column_set(&mut self, bits: Bits) -> usize {
        if let Some(id) = self.by_bits.get(&bits) {
            return *id;
        }
        let mut has_kind = vec![false; self.kinds.len()];
        bits.iter().for_each(|column| has_kind[self.kind[column]] = true);
        let mut efficient: Vec<usize> = Vec::new();
        let mut frontier: Vec<usize> = Vec::new();
        for (column, _) in self.kinds.iter().zip(has_kind).filter(|(_, has_kind)| *has_kind) {
            let room = self.room(*column);
            if frontier.iter().any(|f| fits(room, self.room(*f))) {
                continue;
            }
            frontier.retain(|f| !fits(self.room(*f), room));
            frontier.push(*column);
            efficient.push(*column);
        }
        let id = self.sets.len();
        self.sets.push(ColumnSet { bits: bits.clone(), efficient, frontier, prices: HashMap::new() });
        self.by_bits.insert(bits, id);
        id
    }

    /// Interns the intersection of two sets, and remembers it for these sets and their clones.
    pub fn common_set(&mut self, a: &Bits, b: &Bits) -> usize {
        let key = (a.address(), b.address());
        if let Some((_, _, id)) = self.intersections.get(&key) {
            return *id;
        }
        let id = self.column_set(a.intersection(b));
        self.intersections.insert(key, (a.clone(), b.clone(), id));
        id
    }

    /// Whether some column of the set has room for `need`.
    pub fn any_fits(&self, column_set: usize, need: &[i64]) -> bool {
        self.sets[column_set].frontier.iter().any(|column| fits(need, self.room(*column)))
    }

    /// Estimated price of one pod on the cheapest column of a set: the node's price times the pod's dominant share of its room.
    pub fn price_of(&mut self, column_set: usize, need: &[i64]) -> i64 {
        if let Some(known) = self.sets[column_set].prices.get(need) {
            return *known;
        }
        let share = |column: usize| {
            let price = self.columns[column].price;
            let room = self.room(column);
            let shares = need.iter().zip(room).filter(|(n, _)| **n > 0);
            // Large sizes are scaled down by 2^10, so that price times size stays within 64 bits for every real machine.
            let of = |n: i64, r: i64| price.saturating_mul(n >> 10) / (r >> 10).max(1);
            let exact = |n: i64, r: i64| price.saturating_mul(n) / r.max(1);
            shares.map(|(n, r)| if *n > 1 << 30 { of(*n, *r) } else { exact(*n, *r) }).max().unwrap_or(0)
        };
        // A cheaper node with as much room has the smaller share.
        let efficient = self.sets[column_set].efficient.iter().copied();
        let price = efficient.filter(|c| fits(need, self.room(*c))).map(share).min().unwrap_or(i64::MAX);
        self.sets[column_set].prices.insert(need.to_vec(), price);
        price
    }

    /// Columns that a class's required node terms and tolerations allow.
    pub fn columns_for(&mut self, class: &PodClass) -> Bits {
        self.constrained(&class.node_terms, class)
    }

    /// Columns that `terms` (ORed) and the class's tolerations allow.
    pub fn constrained(&mut self, terms: &[NodeTerm], class: &PodClass) -> Bits {
        let constraint = NodeConstraint { terms: terms.to_vec(), tolerations: class.tolerations.clone() };
        if let Some(bits) = self.constraint_bits.get(&constraint) {
            return bits.clone();
        }
        let mut bits = self.tolerated(class);
        bits.and(&self.by_terms(terms));
        self.constraint_bits.insert(constraint, bits.clone());
        bits
    }

    /// Columns that `terms` (ORed) allow, without regard to taints; no terms allow all columns.
    pub fn by_terms(&mut self, terms: &[NodeTerm]) -> Bits {
        if terms.is_empty() {
            return Bits::full(self.columns.len());
        }
        let mut any = Bits::empty(self.columns.len());
        for term in terms {
            any.or(&self.term_bits(term));
        }
        any
    }

    /// Columns of the NodePools whose taints a class tolerates.
    pub fn tolerated(&mut self, class: &PodClass) -> Bits {
        if let Some(bits) = self.tolerated_bits.get(&class.tolerations) {
            return bits.clone();
        }
        let pools: Vec<bool> =
            self.problem.pools.iter().map(|pool| class.untolerated(&pool.taints).is_none()).collect();
        let mut bits = Bits::empty(self.columns.len());
        for shape in self.shapes.iter().filter(|s| pools[self.variants[s.variant].pool]) {
            (shape.first..shape.end).for_each(|column| bits.insert(column));
        }
        self.tolerated_bits.insert(class.tolerations.clone(), bits.clone());
        bits
    }

    /// Columns without an untolerated `PreferNoSchedule` taint; `None` when those are all columns.
    pub fn without_soft_taints(&self, class: &PodClass) -> Option<Bits> {
        let avoided: Vec<usize> = self
            .soft_tainted
            .iter()
            .copied()
            .filter(|pool| {
                let soft = |t: &&Taint| t.effect == "PreferNoSchedule";
                let mut taints = self.problem.pools[*pool].taints.iter().filter(soft);
                taints.any(|taint| !class.tolerations.iter().any(|t| t.tolerates(taint)))
            })
            .collect();
        (!avoided.is_empty()).then(|| self.where_column(|column| !avoided.contains(&self.pool(column))))
    }

    fn term_bits(&mut self, term: &NodeTerm) -> Bits {
        // A new node never has a given name.
        if term.never || term.name.as_ref().is_some_and(|set| set.finite().is_some()) {
            return Bits::empty(self.columns.len());
        }
        let mut bits = Bits::full(self.columns.len());
        for (key, set) in term.labels.iter() {
            bits.and(self.requirement(key, set));
        }
        bits
    }

    /// Columns that one requirement allows.
    pub fn requirement(&mut self, key: &Arc<str>, set: &ValueSet) -> &Bits {
        let entry = (Arc::clone(key), set.clone());
        if !self.requirement_bits.contains_key(&entry) {
            let mut bits = Bits::empty(self.columns.len());
            match key.as_ref() {
                labels::HOSTNAME => {
                    // A new node has a unique host name: it satisfies exclusions, never a finite set.
                    if set.finite().is_none() {
                        bits = Bits::full(self.columns.len());
                    }
                }
                key if OFFERING_LABELS.contains(&key) => {
                    bits = self.where_column(|column| set.accepts(self.label(column, key)));
                }
                _ => {
                    let shapes = self.shapes_by_value.entry(Arc::clone(key)).or_insert_with(|| {
                        let mut by_value: BTreeMap<Option<String>, Vec<usize>> = BTreeMap::new();
                        for at in 0..self.table.shapes.len() {
                            let value = self.table.shape_label(at, key);
                            match by_value.get_mut(&value.map(str::to_owned)) {
                                Some(shapes) => shapes.push(at),
                                None => drop(by_value.insert(value.map(str::to_owned), vec![at])),
                            }
                        }
                        by_value.into_iter().collect()
                    });
                    for (value, of_value) in shapes {
                        if set.accepts(value.as_deref()) {
                            let columns = of_value.iter().map(|at| &self.table.shapes[*at]);
                            columns.flat_map(|shape| shape.first..shape.end).for_each(|column| bits.insert(column));
                        }
                    }
                }
            }
            self.requirement_bits.insert(entry.clone(), bits);
        }
        &self.requirement_bits[&entry]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::test_support::World;
    use serde_json::json;

    use super::*;

    fn in_zone(column_sets: &mut ColumnSets<'_>, set: &ValueSet) -> Vec<String> {
        let bits = column_sets.requirement(&Arc::from(labels::ZONE), set).clone();
        let zones: BTreeSet<String> = bits.iter().map(|column| column_sets.columns[column].zone.to_string()).collect();
        zones.into_iter().collect()
    }

    #[test]
    fn equal_sets_are_interned_once() {
        let world = World::new();
        let mut column_sets = ColumnSets::new(&world.problem, &ColumnCache::default());
        let all = Bits::full(column_sets.columns.len());
        let first = column_sets.column_set(all.clone());
        assert_eq!(column_sets.column_set(all), first);
        let none = Bits::empty(column_sets.columns.len());
        assert_ne!(column_sets.column_set(none), first);
    }

    #[test]
    fn a_requirement_selects_the_columns_that_satisfy_it() {
        let world = World::new();
        let mut column_sets = ColumnSets::new(&world.problem, &ColumnCache::default());
        assert_eq!(in_zone(&mut column_sets, &ValueSet::one("z-a")), ["z-a"]);
        assert_eq!(in_zone(&mut column_sets, &ValueSet::none_of(["z-a"])), ["z-b", "z-c"]);
        assert!(in_zone(&mut column_sets, &ValueSet::does_not_exist()).is_empty());
        let host: Arc<str> = Arc::from(labels::HOSTNAME);
        assert!(column_sets.requirement(&host, &ValueSet::one("n")).is_empty(), "no new node has a given host name");
        let columns = column_sets.columns.len();
        assert_eq!(column_sets.requirement(&host, &ValueSet::none_of(["n"])).len(), columns);
    }

    #[test]
    fn columns_of_a_tainted_pool_need_a_toleration() {
        let taint = json!({"taints": [{"key": "k", "effect": "NoSchedule"}]});
        let mut world = World::with_pools(&[("default", json!({})), ("tainted", taint)]);
        world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
        world.pods("t", 1, &json!({}), "1", "1Gi", &json!({"tolerations": [{"key": "k", "operator": "Exists"}]}));
        let mut column_sets = ColumnSets::new(&world.problem, &ColumnCache::default());
        let mut pools = |pod: usize| -> BTreeSet<usize> {
            let bits = column_sets.tolerated(&world.problem.pods[pod].class);
            bits.iter().map(|column| column_sets.pool(column)).collect()
        };
        assert_eq!((pools(0), pools(1)), (BTreeSet::from([0]), BTreeSet::from([0, 1])));
    }

    #[test]
    fn a_size_is_priced_by_its_largest_share_of_the_cheapest_column() {
        let world = World::new();
        let mut column_sets = ColumnSets::new(&world.problem, &ColumnCache::default());
        let all = Bits::full(column_sets.columns.len());
        let all = column_sets.column_set(all);
        // Half of the CPU of c1.x2, 80,000 micro-USD per hour, and a quarter of its memory.
        assert_eq!(column_sets.price_of(all, &[1000, 1 << 30, 1, 0]), 40_000);
        let too_large = [1_000_000, 0, 1, 0];
        assert!(!column_sets.any_fits(all, &too_large));
        assert_eq!(column_sets.price_of(all, &too_large), i64::MAX);
    }

    #[test]
    fn the_search_by_load_skips_only_columns_that_are_too_small() {
        let mut world = World::new();
        world.pods("p", 1, &json!({}), "1", "1Gi", &json!({"requests": {"nvidia.com/gpu": "1"}}));
        let column_sets = ColumnSets::new(&world.problem, &ColumnCache::default());
        let mut passed_over = 0;
        for (cpus, gib, gpus) in (0..18).flat_map(|c| (0..18).flat_map(move |m| (0..5).map(move |g| (c, m * 8, g)))) {
            let load = [cpus * 1000, gib << 30, 1, 0, gpus];
            let holds = |column: &&usize| fits(&load, column_sets.room(**column));
            let all: Vec<&usize> = column_sets.by_price.iter().filter(holds).collect();
            let searched = column_sets.by_price_for(&load);
            assert_eq!(searched.iter().filter(holds).collect::<Vec<_>>(), all, "{load:?}");
            passed_over += column_sets.by_price.len() - searched.len();
        }
        assert!(passed_over > 0);
    }
}
