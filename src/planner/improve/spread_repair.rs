//! Keeping what limits have cut short within its rules: where pods of a spread stayed unplaced in one domain, as many are
//! taken back in the others as the skew asks, and pods that follow others go with them.

use crate::planner::state::demand::Content;
use crate::planner::state::plan_state::PlanState;

impl PlanState<'_, '_, '_> {
    /// Takes back placed pods until every rule between domains holds again. Does nothing when all pods are placed.
    pub fn level_out(&mut self, existing: &mut Vec<(usize, Content)>) {
        let topology = self.topology;
        let pins = |state: &Self, item: usize| state.demand.places[state.demand.items[item].place].pins.clone();
        let mut planned = topology.planned();
        let mut any = false;
        for item in 0..self.demand.items.len() {
            let (left, group) = (self.demand.items[item].left, self.demand.items[item].group);
            if left > 0 {
                for (key, domain) in pins(self, item) {
                    any = true;
                    topology.unplan(&mut planned, group, key, domain, left);
                }
            }
        }
        if !any {
            return;
        }
        let mut placed: Vec<usize> = vec![0; self.demand.items.len()];
        let contents = self.bought.iter().map(|node| &node.content).chain(existing.iter().map(|(_, content)| content));
        for (item, count) in contents.flatten() {
            placed[*item] += count;
        }
        loop {
            let of = |group: usize, key: usize, domain: usize| -> usize {
                (0..placed.len())
                    .filter(|i| self.demand.items[*i].group == group && pins(self, *i).contains(&(key, domain)))
                    .map(|i| placed[i])
                    .sum()
            };
            let Some((group, key, domain, mut drop)) = topology.overflow(&planned, &of) else {
                break;
            };
            for (item, placed) in placed.iter_mut().enumerate() {
                if self.demand.items[item].group != group || !pins(self, item).contains(&(key, domain)) {
                    continue;
                }
                let count = drop.min(*placed);
                if count == 0 {
                    continue;
                }
                self.take_back(item, count, existing);
                *placed -= count;
                drop -= count;
                for (key, domain) in pins(self, item) {
                    topology.unplan(&mut planned, group, key, domain, count);
                }
            }
        }
    }

    /// Takes pods of an item off the nodes, the last bought first, those that exist last.
    fn take_back(&mut self, item: usize, mut count: usize, existing: &mut Vec<(usize, Content)>) {
        let bought = self.bought.iter_mut().rev().map(|node| &mut node.content);
        for content in bought.chain(existing.iter_mut().rev().map(|(_, content)| content)) {
            if let Some((_, have)) = content.iter_mut().find(|(have, _)| *have == item) {
                let taken = count.min(*have);
                *have -= taken;
                count -= taken;
                self.demand.give_back(&[(item, taken)]);
            }
            content.retain(|(_, n)| *n > 0);
            if count == 0 {
                break;
            }
        }
        let mut emptied = Vec::new();
        self.bought.retain(|node| {
            if node.content.is_empty() {
                emptied.push(node.column);
            }
            !node.content.is_empty()
        });
        for column in emptied {
            let pool = self.column_sets.pool(column);
            self.budgets[pool].refund(&self.column_sets.instance_type(column).capacity);
        }
        existing.retain(|(_, content)| !content.is_empty());
    }
}
