//! Pods by index: items count pods, the plan names them.

use crate::planner::state::plan_state::PlanState;

/// Hands out the pods of each item, from the front of its group's list.
pub(crate) struct PodCursor {
    next: Vec<usize>,
}

impl PodCursor {
    pub fn new(state: &PlanState<'_, '_>) -> Self {
        Self { next: state.demand.items.iter().map(|item| item.first).collect() }
    }

    pub fn take<'g>(&mut self, state: &PlanState<'g, '_>, item: usize, count: usize) -> &'g [usize] {
        let from = self.next[item];
        self.next[item] += count;
        &state.demand.groups[state.demand.items[item].group].pods[from..from + count]
    }

    /// The pods of a pattern, sorted.
    pub fn take_pattern(&mut self, state: &PlanState<'_, '_>, pattern: &[(usize, usize)]) -> Vec<usize> {
        let mut pods: Vec<usize> =
            pattern.iter().flat_map(|(item, count)| self.take(state, *item, *count)).copied().collect();
        pods.sort_unstable();
        pods
    }
}
