//! The remaining limits of a NodePool: resources and node count that its new nodes may still use.

use std::sync::Arc;

use crate::model::resources::Resources;
use crate::planner::input::pool::Pool;

/// Limits minus usage. Negative where usage exceeds a limit already.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    remaining: Vec<(Limit, i64)>,
    nodes: Option<i64>,
}

/// A limited resource. Its name is resolved once, because limits are checked for every candidate column.
#[derive(Clone, Debug)]
enum Limit {
    Cpu,
    Memory,
    Other(Arc<str>),
}

impl Limit {
    fn of(name: &Arc<str>) -> Self {
        match name.as_ref() {
            "cpu" => Self::Cpu,
            "memory" => Self::Memory,
            _ => Self::Other(Arc::clone(name)),
        }
    }

    fn get(&self, capacity: &Resources) -> i64 {
        match self {
            Self::Cpu => capacity.cpu.0,
            Self::Memory => capacity.memory.0,
            Self::Other(name) => capacity.get(name),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Other(name) => name,
        }
    }
}

impl Budget {
    pub fn of(pool: &Pool) -> Self {
        let remaining = pool.limits.iter().flat_map(|limits| {
            pool.limited.iter().map(|name| (Limit::of(name), limits.get(name) - pool.usage.get(name)))
        });
        Self { remaining: remaining.collect(), nodes: pool.node_limit.map(|limit| limit - pool.node_count) }
    }

    pub fn is_limited(&self) -> bool {
        self.nodes.is_some() || !self.remaining.is_empty()
    }

    /// Whether one more node of this capacity stays within the limits.
    pub fn allows(&self, capacity: &Resources) -> bool {
        let within = |(limit, remaining): &(Limit, i64)| limit.get(capacity) <= (*remaining).max(0);
        self.nodes.is_none_or(|n| n > 0) && self.remaining.iter().all(within)
    }

    /// How many more nodes of this capacity stay within the limits, at most `max`.
    pub fn copies(&self, capacity: &Resources, max: usize) -> usize {
        let mut copies = i64::try_from(max).unwrap_or(i64::MAX);
        if let Some(nodes) = self.nodes {
            copies = copies.min(nodes);
        }
        for (limit, remaining) in &self.remaining {
            let each = limit.get(capacity);
            if each > 0 {
                copies = copies.min(remaining / each);
            }
        }
        usize::try_from(copies.max(0)).unwrap_or(0)
    }

    pub fn spend(&mut self, capacity: &Resources, copies: usize) {
        let copies = i64::try_from(copies).unwrap_or(i64::MAX);
        self.nodes = self.nodes.map(|n| n - copies);
        for (limit, remaining) in &mut self.remaining {
            *remaining -= limit.get(capacity) * copies;
        }
    }

    pub fn refund(&mut self, capacity: &Resources) {
        self.nodes = self.nodes.map(|n| n + 1);
        for (limit, remaining) in &mut self.remaining {
            *remaining += limit.get(capacity);
        }
    }

    /// Restores the node count by one: for capacity that is spent without a node of its own.
    pub fn add_node(&mut self) {
        self.nodes = self.nodes.map(|n| n + 1);
    }

    /// Name of the first limit that a node of this capacity exceeds.
    pub fn exceeded_limit(&self, capacity: &Resources) -> Option<&str> {
        if self.nodes.is_some_and(|n| n <= 0) {
            return Some("nodes");
        }
        let exceeds = |(limit, remaining): &&(Limit, i64)| limit.get(capacity) > (*remaining).max(0);
        self.remaining.iter().find(exceeds).map(|(limit, _)| limit.name())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::units::{Bytes, Millicores};
    use crate::test_support::planner::read_pool;

    fn budget(limits: &Value) -> Budget {
        let pool = if limits.is_null() { json!({}) } else { json!({"limits": limits}) };
        Budget::of(&read_pool("p", &pool).unwrap())
    }

    fn capacity(cpus: i64) -> Resources {
        Resources { cpu: Millicores(cpus * 1000), memory: Bytes(cpus << 30), ..Resources::default() }
    }

    #[test]
    fn copies_are_bounded_by_every_limit() {
        for (limits, copies) in [
            (json!(null), 9),
            (json!({"cpu": "10"}), 5),
            (json!({"cpu": "10", "memory": "6Gi"}), 3),
            (json!({"nodes": "2"}), 2),
            (json!({"cpu": "1"}), 0),
            (json!({"nvidia.com/gpu": "0"}), 9),
        ] {
            let budget = budget(&limits);
            assert_eq!(budget.copies(&capacity(2), 9), copies, "{limits}");
            assert_eq!(budget.allows(&capacity(2)), copies > 0, "{limits}");
            assert_eq!(budget.is_limited(), !limits.is_null(), "{limits}");
        }
    }

    #[test]
    fn spending_and_refunding_are_inverse_and_name_the_exceeded_limit() {
        let mut budget = budget(&json!({"cpu": "4", "nodes": "2"}));
        assert_eq!((budget.exceeded_limit(&capacity(2)), budget.exceeded_limit(&capacity(5))), (None, Some("cpu")));
        budget.spend(&capacity(1), 2);
        assert_eq!((budget.allows(&capacity(1)), budget.exceeded_limit(&capacity(1))), (false, Some("nodes")));
        budget.add_node();
        assert_eq!(budget.copies(&capacity(1), 9), 1, "the node count alone is restored");
        budget.refund(&capacity(1));
        assert_eq!(budget.copies(&capacity(1), 9), 2);
    }
}
