//! Pods by index: items count pods, the plan names them.

use crate::state::plan_state::PlanState;

/// The place of a pod: that of the item's pod with this number, in the order of [`PodCursor::take`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    pub item: usize,
    pub pod: usize,
}

/// Hands out the pods of each item, longest waiting first.
pub(crate) struct PodCursor {
    /// By group: its pods, those of an item from [`DemandItem::first`] on.
    ///
    /// [`DemandItem::first`]: crate::state::demand::DemandItem::first
    dealt: Vec<Vec<usize>>,
    next: Vec<usize>,
}

impl PodCursor {
    /// `turns` is an order in which kube-scheduler can bind pods. It attempts those of a group in the order in which they came, so they are dealt in this
    /// order: each can be bound when it is attempted. Places that have no turn come last. Requires that merged items are split.
    pub fn new(state: &PlanState<'_, '_>, turns: &[Turn]) -> Self {
        let items = &state.demand.items;
        let mut places: Vec<Vec<usize>> = vec![Vec::new(); state.demand.groups.len()];
        for turn in turns {
            let item = &items[turn.item];
            places[item.group].push(item.first + turn.pod);
        }
        let groups = state.demand.groups.iter().zip(&places);
        let dealt = groups.map(|(group, places)| deal(&group.pods, places)).collect();
        Self { dealt, next: items.iter().map(|item| item.first).collect() }
    }

    pub fn take(&mut self, state: &PlanState<'_, '_>, item: usize, count: usize) -> &[usize] {
        let from = self.next[item];
        self.next[item] += count;
        self.of_group(state.demand.items[item].group, from, count)
    }

    /// `count` pods of a group's list from `first` on.
    pub fn of_group(&self, group: usize, first: usize, count: usize) -> &[usize] {
        &self.dealt[group][first..first + count]
    }

    /// The pods of a pattern, sorted.
    pub fn take_pattern(&mut self, state: &PlanState<'_, '_>, pattern: &[(usize, usize)]) -> Vec<usize> {
        let mut pods: Vec<usize> = Vec::with_capacity(pattern.iter().map(|(_, count)| count).sum());
        for (item, count) in pattern {
            pods.extend(self.take(state, *item, *count));
        }
        pods.sort_unstable();
        pods
    }
}

/// The list in which the first pods have these places, in this order, and the others the places that are left.
fn deal(pods: &[usize], places: &[usize]) -> Vec<usize> {
    let mut out = vec![None; pods.len()];
    let (first, rest) = pods.split_at(places.len());
    for (pod, place) in first.iter().zip(places) {
        out[*place] = Some(*pod);
    }
    let mut rest = rest.iter();
    out.into_iter().filter_map(|pod| pod.or_else(|| rest.next().copied())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_get_their_places_in_turn_and_the_last_ones_those_that_are_left() {
        assert_eq!(deal(&[10, 11, 12, 13, 14, 15], &[0, 3, 1, 4]), [10, 12, 14, 11, 13, 15]);
        assert_eq!(deal(&[10, 11], &[]), [10, 11]);
    }
}
