//! The plan under construction, shared by all stages of the solver. Data only: stages are functions in `pricing`, `pack`,
//! `improve` and `output`.

use crate::model::resources::Resources;
use crate::planner::columns::sets::ColumnSets;
use crate::planner::groups::existing::HostState;
use crate::planner::groups::group::HostCounters;
use crate::planner::groups::selectors::Selectors;
use crate::planner::groups::topology::counts::Topology;
use crate::planner::state::budget::Budget;
use crate::planner::state::demand::{Content, Demand};

/// A node that is bought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PurchasedNode {
    pub column: usize,
    pub content: Content,
}

/// Everything a plan is made with.
pub(crate) struct PlanState<'u, 'p, 'g> {
    pub column_sets: &'u mut ColumnSets<'p>,
    pub topology: &'u Topology,
    pub demand: Demand<'g>,
    pub bought: Vec<PurchasedNode>,
    pub budgets: Vec<Budget>,
    /// The most of each resource that anything offered has, by pool.
    pub largest: Vec<Resources>,
    /// Host state of a new node, by set of daemons.
    pub daemon_hosts: Vec<HostState>,
    /// Prices of the first demand, for right-sizing and existing nodes.
    pub reference: Vec<f64>,
    pub bound: Option<f64>,
    /// Counters that a running pod raises.
    pub running_counters: std::collections::BTreeSet<u32>,
    /// Share of its worth at which what is left is priced anew.
    pub patience: f64,
    pub strategy: Strategy,
    /// Prices by place when the round began.
    pub first_prices: Vec<Vec<f64>>,
}

/// A strategy to buy. Nothing tells beforehand which serves a demand best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strategy {
    /// How much the direction counts against the size when a node is filled: with few sizes it keeps the mix, with many
    /// sizes the largest first is best.
    pub power: i32,
    /// Nodes no dearer than what is left is worth for each node that slots make necessary.
    pub even: bool,
}

/// The ways to buy.
pub(crate) const STRATEGIES: [Strategy; 3] =
    [Strategy { power: 2, even: false }, Strategy { power: 0, even: false }, Strategy { power: 0, even: true }];

/// Share of its worth at which what is left is priced anew.
pub(crate) const PATIENCE: f64 = 0.88;

impl<'u, 'p, 'g> PlanState<'u, 'p, 'g> {
    pub fn new(
        column_sets: &'u mut ColumnSets<'p>,
        topology: &'u Topology,
        demand: Demand<'g>,
        selectors: &mut Selectors<'p>,
        counters: &HostCounters,
    ) -> Self {
        let budgets = column_sets.problem.pools.iter().map(Budget::of).collect();
        let mut largest = vec![Resources::default(); column_sets.problem.pools.len()];
        for shape in &column_sets.shapes {
            largest[column_sets.pool(shape.first)].raise_to(&shape.instance_type.capacity);
        }
        let rules: Vec<_> = column_sets.problem.daemons.iter().map(|d| counters.daemon(&d.class, selectors)).collect();
        let mut daemon_hosts: Vec<HostState> = Vec::new();
        for column in 0..column_sets.columns.len() {
            let set = column_sets.daemon_set(column);
            if daemon_hosts.len() <= set {
                daemon_hosts.resize_with(set + 1, HostState::default);
            }
            if daemon_hosts[set].counts.is_empty() && daemon_hosts[set].caps.is_empty() {
                for daemon in column_sets.daemons(column) {
                    daemon_hosts[set].add(&rules[*daemon]);
                }
            }
        }
        // About what compute costs on EC2, in micro-USD per hour: only directions matter until there are dual prices.
        let mut reference = vec![25.0, 3e3 / 1_073_741_824.0, 10.0, 0.0];
        reference.resize(column_sets.dims.len(), 1000.0);
        (0..reference.len()).filter(|dim| column_sets.dims.is_attach(*dim)).for_each(|dim| reference[dim] = 0.0);
        Self {
            column_sets,
            topology,
            demand,
            bought: Vec::new(),
            budgets,
            largest,
            daemon_hosts,
            reference,
            bound: None,
            running_counters: std::collections::BTreeSet::new(),
            strategy: STRATEGIES[0],
            patience: PATIENCE,
            first_prices: Vec::new(),
        }
    }

    pub fn daemon_host(&self, column: usize) -> &HostState {
        &self.daemon_hosts[self.column_sets.daemon_set(column)]
    }
}
