//! The [market](crate::planner::columns::table) as one problem sees it: a class's node constraints become a set of columns, each set once.

use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;

use crate::model::labels;
use crate::model::offering::OFFERING_LABELS;
use crate::model::pod_class::{NodeTerm, PodClass};
use crate::model::requirement::ValueSet;
use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::fits;
use crate::planner::columns::table::{Asked, Market};
use crate::planner::input::problem::Problem;

/// An interned set of columns.
#[derive(Debug)]
pub(crate) struct Signature {
    pub bits: Bits,
    /// Columns whose room no other column of the set exceeds in every dimension.
    pub frontier: Vec<usize>,
    /// About what a pod of a size costs there, once it was asked for.
    prices: HashMap<Vec<i64>, i64>,
}

/// All columns and the sets made of them.
pub(crate) struct Universe<'p> {
    pub problem: &'p Problem,
    market: Arc<Market>,
    pub signatures: Vec<Signature>,
    by_bits: HashMap<Bits, usize>,
    requirement_bits: HashMap<(Arc<str>, ValueSet), Bits>,
    constraint_bits: HashMap<NodeConstraint, Bits>,
}

impl Deref for Universe<'_> {
    type Target = Market;

    fn deref(&self) -> &Market {
        &self.market
    }
}

/// What of a class decides which nodes it may use.
#[derive(Clone, PartialEq, Eq, Hash)]
struct NodeConstraint {
    terms: Vec<NodeTerm>,
    tolerations: Vec<crate::model::pod_class::Toleration>,
}

impl<'p> Universe<'p> {
    pub fn new(problem: &'p Problem) -> Self {
        let market = problem.memory.market(Asked::of(problem), |asked| {
            // Which columns a daemon runs on is asked of a universe without daemons.
            let mut bare = Self::over(problem, Arc::new(Market::bare(problem, asked)));
            let daemons = bare.daemons_of_problem();
            let mut market = Arc::into_inner(bare.market).expect("nobody else has it yet");
            market.complete(&daemons);
            market
        });
        Self::over(problem, market)
    }

    fn over(problem: &'p Problem, market: Arc<Market>) -> Self {
        Self {
            problem,
            market,
            signatures: Vec::new(),
            by_bits: HashMap::new(),
            requirement_bits: HashMap::new(),
            constraint_bits: HashMap::new(),
        }
    }

    /// Requests of each DaemonSet's pods, and the columns they run on.
    fn daemons_of_problem(&mut self) -> Vec<(Vec<i64>, Bits)> {
        let daemons = self.problem.daemons.iter();
        daemons
            .map(|daemon| (self.dims.dense(&daemon.class.requests.foreseeable()), self.columns_for(&daemon.class)))
            .collect()
    }
}

impl Universe<'_> {
    /// Interns a set of columns.
    pub fn signature(&mut self, bits: Bits) -> usize {
        if let Some(id) = self.by_bits.get(&bits) {
            return *id;
        }
        let mut seen: BTreeSet<&[i64]> = BTreeSet::new();
        let mut frontier: Vec<usize> = Vec::new();
        for column in bits.iter() {
            let room = self.room(column);
            if !seen.insert(room) || frontier.iter().any(|f| fits(room, self.room(*f))) {
                continue;
            }
            frontier.retain(|f| !fits(self.room(*f), room));
            frontier.push(column);
        }
        let id = self.signatures.len();
        self.signatures.push(Signature { bits: bits.clone(), frontier, prices: HashMap::new() });
        self.by_bits.insert(bits, id);
        id
    }

    /// Whether some column of the set holds this much.
    pub fn any_fits(&self, signature: usize, need: &[i64]) -> bool {
        self.signatures[signature].frontier.iter().any(|column| fits(need, self.room(*column)))
    }

    /// About what one pod of this size costs on the cheapest column of a set: the price of its largest share of a node.
    pub fn price_of(&mut self, signature: usize, need: &[i64]) -> i64 {
        if let Some(known) = self.signatures[signature].prices.get(need) {
            return *known;
        }
        let share = |column: usize| {
            let price = self.columns[column].price;
            let room = self.room(column);
            let shares = need.iter().zip(room).filter(|(n, _)| **n > 0);
            // Prices in micro-USD and sizes in bytes overflow 64 bits only for what no machine has.
            let of = |n: i64, r: i64| price.saturating_mul(n >> 10) / (r >> 10).max(1);
            let exact = |n: i64, r: i64| price.saturating_mul(n) / r.max(1);
            shares.map(|(n, r)| if *n > 1 << 30 { of(*n, *r) } else { exact(*n, *r) }).max().unwrap_or(0)
        };
        let bits = &self.signatures[signature].bits;
        let price = bits.iter().filter(|c| fits(need, self.room(*c))).map(share).min().unwrap_or(i64::MAX);
        self.signatures[signature].prices.insert(need.to_vec(), price);
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

    /// Columns that `terms` (ORed) allow, taints aside; no terms allow all.
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
    pub fn tolerated(&self, class: &PodClass) -> Bits {
        let pools: Vec<bool> =
            self.problem.pools.iter().map(|pool| class.untolerated(&pool.taints).is_none()).collect();
        let mut bits = Bits::empty(self.columns.len());
        for shape in self.shapes.iter().filter(|s| pools[self.variants[s.variant].pool]) {
            (shape.first..shape.end).for_each(|column| bits.insert(column));
        }
        bits
    }

    /// Columns without a `PreferNoSchedule` taint that the class doesn't tolerate; `None` when all are.
    pub fn without_soft_taints(&self, class: &PodClass) -> Option<Bits> {
        let disliked: Vec<usize> = self
            .soft_tainted
            .iter()
            .copied()
            .filter(|pool| {
                let soft = |t: &&Taint| t.effect == "PreferNoSchedule";
                let mut taints = self.problem.pools[*pool].taints.iter().filter(soft);
                taints.any(|taint| !class.tolerations.iter().any(|t| t.tolerates(taint)))
            })
            .collect();
        (!disliked.is_empty()).then(|| self.where_column(|column| !disliked.contains(&self.pool(column))))
    }

    fn term_bits(&mut self, term: &NodeTerm) -> Bits {
        // The name of a node that doesn't exist yet equals no given name.
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
                    // A new node has a host name of its own: any but those that are named.
                    if set.finite().is_none() {
                        bits = Bits::full(self.columns.len());
                    }
                }
                key if OFFERING_LABELS.contains(&key) => {
                    bits = self.where_column(|column| set.accepts(self.label(column, key)));
                }
                _ => {
                    for (at, shape) in self.shapes.iter().enumerate() {
                        if set.accepts(self.shape_label(at, key)) {
                            (shape.first..shape.end).for_each(|column| bits.insert(column));
                        }
                    }
                }
            }
            self.requirement_bits.insert(entry.clone(), bits);
        }
        &self.requirement_bits[&entry]
    }
}
