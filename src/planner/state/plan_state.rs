//! The plan under construction. Data and its bookkeeping only: the stages that fill it are functions in `pack`, `improve` and
//! `output`.

use std::collections::BTreeSet;

use stowage_model::pod_class::PodClass;

use crate::columns::sets::ColumnSets;
use crate::groups::existing_nodes::{ExistingNode, HostState};
use crate::groups::host_rules::HostRules;
use crate::groups::topology::counts::Topology;
use crate::groups::topology::domains::Assignment;
use crate::state::demand::Demand;
use crate::state::demand::pattern::Pattern;
use crate::state::pool_budget::Budget;

/// A new node: the column it is purchased as and the pods on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PurchasedNode {
    pub column: usize,
    pub pattern: Pattern,
}

/// A packing strategy. Which one wins depends on the demand, so all are tried and the cheapest result is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strategy {
    /// Exponent of the cosine in the bin-filling score. With few distinct sizes a high exponent preserves the mix of the
    /// demand; with many sizes 0 (largest first) is best.
    pub cosine_power: i32,
    /// Whether no node may cost more than the value of the demand divided by the nodes that host caps require.
    pub limit_node_price: bool,
    /// Whether each size tier has dual prices of its own, of the columns that hold its pods whole.
    pub price_by_size: bool,
}

pub(crate) const STRATEGIES: [Strategy; 3] = [
    Strategy { cosine_power: 2, limit_node_price: false, price_by_size: false },
    Strategy { cosine_power: 0, limit_node_price: false, price_by_size: false },
    Strategy { cosine_power: 0, limit_node_price: true, price_by_size: false },
];

/// The state that every stage reads and updates.
///
/// Invariants between stages: each pod of the demand is either remaining, in a pattern of `purchased` or in one of
/// `placements`; `budgets` are net of `purchased`.
pub(crate) struct PlanState<'u, 'p> {
    pub column_sets: &'u mut ColumnSets<'p>,
    pub topology: &'u Topology,
    pub assignments: &'u [Assignment],
    pub demand: Demand<'u>,
    /// Nodes that exist or are launching, with their free capacity.
    pub existing: Vec<ExistingNode<'p>>,
    /// Host state of each existing node before this plan; empty where no pod has host preferences.
    pub initial_hosts: Vec<HostState>,
    /// Pods placed on existing nodes: index into `existing` and pattern. A node may occur more than once.
    pub placements: Vec<(usize, Pattern)>,
    pub purchased: Vec<PurchasedNode>,
    /// Nodes of `purchased` that stay, from the first on: those of earlier passes, whose pods have a NodePool of higher weight or a column
    /// that they prefer.
    pub fixed: usize,
    /// Items with pods that some order of binding leaves without their planned node.
    pub unbindable: BTreeSet<usize>,
    /// Remaining limits, by NodePool.
    pub budgets: Vec<Budget>,
    /// Host state of a new node, by daemon set id of its column.
    daemon_hosts: Vec<HostState>,
    /// Resource prices used before there are dual prices, in micro-USD per hour and unit.
    pub reference_prices: Vec<f64>,
    /// Host counters that a pod on an existing node raises.
    pub running_counters: BTreeSet<u32>,
    /// The strategy of the last purchases.
    pub strategy: Strategy,
}

impl<'u, 'p> PlanState<'u, 'p> {
    /// `daemon_rules` are the host rules of each daemon of the problem.
    pub fn new(
        column_sets: &'u mut ColumnSets<'p>,
        (topology, assignments): (&'u Topology, &'u [Assignment]),
        demand: Demand<'u>,
        (existing, running_counters): (Vec<ExistingNode<'p>>, BTreeSet<u32>),
        daemon_rules: &[HostRules],
    ) -> Self {
        let budgets = column_sets.problem.pools.iter().map(Budget::of).collect();
        let initial_hosts = if demand.has_host_preferences() {
            existing.iter().map(|node| node.host.clone()).collect()
        } else {
            Vec::new()
        };
        Self {
            budgets,
            daemon_hosts: daemon_hosts(column_sets, daemon_rules),
            reference_prices: reference_prices(column_sets),
            column_sets,
            topology,
            assignments,
            demand,
            existing,
            initial_hosts,
            placements: Vec::new(),
            purchased: Vec::new(),
            fixed: 0,
            unbindable: BTreeSet::new(),
            running_counters,
            strategy: STRATEGIES[0],
        }
    }

    /// Host state of a new node of this column: its daemons' host ports.
    pub fn daemon_host(&self, column: usize) -> &HostState {
        &self.daemon_hosts[self.column_sets.daemon_set(column)]
    }

    /// A class with the node constraints of all items of a column pool.
    pub fn class(&self, column_pool: usize) -> &'u PodClass {
        &self.demand.groups[self.demand.column_pools[column_pool].sample].class
    }

    /// Comparison price of all purchased nodes, in micro-USD per hour.
    pub fn cost(&self) -> i64 {
        self.purchased.iter().map(|node| self.column_sets.columns[node.column].price).sum()
    }

    /// Whether the limits of its NodePool admit one more node of this column.
    pub fn affords(&self, column: usize) -> bool {
        self.budgets[self.column_sets.pool(column)].allows(self.column_sets.charge(column))
    }

    /// How many more nodes of this column the limits admit, at most `max`.
    pub fn affordable_copies(&self, column: usize, max: usize) -> usize {
        self.budgets[self.column_sets.pool(column)].copies(self.column_sets.charge(column), max)
    }

    pub fn spend(&mut self, column: usize, copies: usize) {
        self.budgets[self.column_sets.pool(column)].spend(self.column_sets.charge(column), copies);
    }

    pub fn refund(&mut self, column: usize) {
        self.budgets[self.column_sets.pool(column)].refund(self.column_sets.charge(column));
    }

    /// Purchases `copies` equal nodes: spends the budget, takes the pods from the demand, records the nodes.
    pub fn purchase(&mut self, node: PurchasedNode, copies: usize) {
        self.spend(node.column, copies);
        self.demand.take(&node.pattern, copies);
        self.purchased.extend(std::iter::repeat_n(node, copies));
    }

    /// Splits merged items, so that patterns name pods of one group. No bin can be filled afterwards.
    pub fn split_merged(&mut self) {
        let placed = self.placements.iter_mut().map(|(_, pattern)| pattern);
        self.demand.split_merged(placed.chain(self.purchased.iter_mut().map(|node| &mut node.pattern)));
    }
}

fn daemon_hosts(column_sets: &ColumnSets<'_>, daemon_rules: &[HostRules]) -> Vec<HostState> {
    let mut out: Vec<HostState> = Vec::new();
    for column in 0..column_sets.columns.len() {
        let set = column_sets.daemon_set(column);
        if out.len() <= set {
            out.resize_with(set + 1, HostState::default);
        }
        if out[set].is_empty() {
            for daemon in column_sets.daemons(column) {
                out[set].add(&daemon_rules[*daemon]);
            }
        }
    }
    out
}

/// Approximate EC2 compute prices in micro-USD per hour and unit: only their ratios matter until there are dual prices. Volume
/// attachments are free.
fn reference_prices(column_sets: &ColumnSets<'_>) -> Vec<f64> {
    const PER_MILLICORE: f64 = 25.0;
    const PER_BYTE: f64 = 3e3 / 1_073_741_824.0;
    const PER_POD: f64 = 10.0;
    const PER_EXTENDED: f64 = 1000.0;
    let mut prices = vec![PER_MILLICORE, PER_BYTE, PER_POD, 0.0];
    prices.resize(column_sets.dims.len(), PER_EXTENDED);
    (0..prices.len()).filter(|dim| column_sets.dims.is_attach(*dim)).for_each(|dim| prices[dim] = 0.0);
    prices
}
