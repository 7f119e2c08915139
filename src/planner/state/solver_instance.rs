//! A problem prepared for the solver: columns, pod groups, existing nodes, and the assignment of groups to topology domains.

use std::collections::BTreeSet;

use crate::columns::sets::ColumnSets;
use crate::columns::table::ColumnCache;
use crate::groups::existing_nodes::{ExistingNode, existing_nodes};
use crate::groups::group::{Group, group};
use crate::groups::host_rules::{HostCounters, register};
use crate::groups::pod_selectors::Selectors;
use crate::groups::topology::counts::Topology;
use crate::groups::topology::domains::Assignment;
use crate::input::problem::Problem;
use crate::state::demand::Demand;
use crate::state::feedback::Feedback;
use crate::state::plan_state::PlanState;

/// Everything about a problem that no stage of the solver changes, except for interning further column sets.
pub(crate) struct SolverInstance<'p> {
    column_sets: ColumnSets<'p>,
    selectors: Selectors<'p>,
    host_counters: HostCounters,
    pub groups: Vec<Group>,
    existing: Vec<ExistingNode<'p>>,
    /// Host counters above zero on some existing node.
    running_counters: BTreeSet<u32>,
    topology: Topology,
    assignments: Vec<Assignment>,
}

impl<'p> SolverInstance<'p> {
    pub fn new(problem: &'p Problem, cache: &ColumnCache, feedback: &Feedback) -> Self {
        let mut column_sets = ColumnSets::new(problem, cache);
        let (mut selectors, host_counters) = register(problem);
        let groups = group(&mut column_sets, &mut selectors, &host_counters);
        let (existing, running_counters) = existing_nodes(&column_sets, &mut selectors, &host_counters, &groups);
        let (occupied, room) = (feedback.occupied_domains.clone(), feedback.room.clone());
        let mut topology = Topology::new(&column_sets, &mut selectors, &groups, occupied, room);
        let assignments = topology.assign(&mut column_sets, &mut selectors, &groups, (&existing, &running_counters));
        Self { column_sets, selectors, host_counters, groups, existing, running_counters, topology, assignments }
    }

    /// The plan state in which nothing is placed yet. The existing nodes move into it.
    pub fn state(&mut self, by_priority: bool) -> PlanState<'_, 'p> {
        let demand = Demand::new(
            &mut self.column_sets,
            &self.topology,
            &self.groups,
            &self.assignments,
            self.host_counters.len(),
            by_priority,
        );
        let problem = self.column_sets.problem;
        let daemons = problem.daemons.iter();
        let daemon_rules: Vec<_> =
            daemons.map(|daemon| self.host_counters.daemon(&daemon.class, &mut self.selectors)).collect();
        let existing = std::mem::take(&mut self.existing);
        let running_counters = std::mem::take(&mut self.running_counters);
        PlanState::new(
            &mut self.column_sets,
            (&self.topology, &self.assignments),
            demand,
            (existing, running_counters),
            &daemon_rules,
        )
    }
}
