//! The remaining limits of a NodePool: resources, money and node count that its new nodes may still use.

use std::sync::Arc;

use stowage_model::labels::USD_PER_HOUR;

use crate::columns::table::Charge;
use crate::input::pool::Pool;

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
    Price,
    Other(Arc<str>),
}

impl Limit {
    fn of(name: &Arc<str>) -> Self {
        match name.as_ref() {
            "cpu" => Self::Cpu,
            "memory" => Self::Memory,
            USD_PER_HOUR => Self::Price,
            _ => Self::Other(Arc::clone(name)),
        }
    }

    fn get(&self, charge: Charge<'_>) -> i64 {
        match self {
            Self::Cpu => charge.capacity.cpu.0,
            Self::Memory => charge.capacity.memory.0,
            Self::Price => charge.price,
            Self::Other(name) => charge.capacity.get(name),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Price => USD_PER_HOUR,
            Self::Other(name) => name,
        }
    }
}

impl Budget {
    pub fn of(pool: &Pool) -> Self {
        let remaining = pool.limits.iter().flat_map(|limits| {
            pool.limited.iter().map(|name| (Limit::of(name), limits.get(name).saturating_sub(pool.usage.get(name))))
        });
        Self { remaining: remaining.collect(), nodes: pool.node_limit.map(|limit| limit - pool.node_count) }
    }

    pub fn is_limited(&self) -> bool {
        self.nodes.is_some() || !self.remaining.is_empty()
    }

    /// Whether one more such node stays within the limits.
    pub fn allows(&self, charge: Charge<'_>) -> bool {
        let within = |(limit, remaining): &(Limit, i64)| limit.get(charge) <= (*remaining).max(0);
        self.nodes.is_none_or(|n| n > 0) && self.remaining.iter().all(within)
    }

    /// How many more such nodes stay within the limits, at most `max`.
    pub fn copies(&self, charge: Charge<'_>, max: usize) -> usize {
        let mut copies = i64::try_from(max).unwrap_or(i64::MAX);
        if let Some(nodes) = self.nodes {
            copies = copies.min(nodes);
        }
        for (limit, remaining) in &self.remaining {
            let each = limit.get(charge);
            if each > 0 {
                copies = copies.min(remaining / each);
            }
        }
        usize::try_from(copies.max(0)).unwrap_or(0)
    }

    pub fn spend(&mut self, charge: Charge<'_>, copies: usize) {
        let copies = i64::try_from(copies).unwrap_or(i64::MAX);
        self.nodes = self.nodes.map(|n| n - copies);
        for (limit, remaining) in &mut self.remaining {
            *remaining -= limit.get(charge) * copies;
        }
    }

    pub fn refund(&mut self, charge: Charge<'_>) {
        self.nodes = self.nodes.map(|n| n + 1);
        for (limit, remaining) in &mut self.remaining {
            *remaining += limit.get(charge);
        }
    }

    /// Name of the first limit that such a node exceeds.
    pub fn exceeded_limit(&self, charge: Charge<'_>) -> Option<&str> {
        if self.nodes.is_some_and(|n| n <= 0) {
            return Some("nodes");
        }
        let exceeds = |(limit, remaining): &&(Limit, i64)| limit.get(charge) > (*remaining).max(0);
        self.remaining.iter().find(exceeds).map(|(limit, _)| limit.name())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::resources::Resources;
    use stowage_model::units::{Bytes, Millicores};

    use super::*;
    use crate::test_support::read_pool;

    fn budget(limits: &Value) -> Budget {
        let pool = if limits.is_null() { json!({}) } else { json!({"limits": limits}) };
        Budget::of(&read_pool("p", &pool).unwrap())
    }

    fn capacity(cpus: i64) -> Resources {
        Resources { cpu: Millicores(cpus * 1000), memory: Bytes(cpus << 30), ..Resources::default() }
    }

    /// A node for 0.05 USD per hour and CPU.
    fn charge(capacity: &Resources) -> Charge<'_> {
        Charge { capacity, price: capacity.cpu.0 * 50 }
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
            (json!({"stowage.dev/usd-per-hour": "0.3"}), 3),
            (json!({"stowage.dev/usd-per-hour": "299999u"}), 2),
            (json!({"stowage.dev/usd-per-hour": "0.3", "cpu": "4"}), 2),
            (json!({"stowage.dev/usd-per-hour": "0"}), 0),
        ] {
            let (budget, node) = (budget(&limits), capacity(2));
            assert_eq!(budget.copies(charge(&node), 9), copies, "{limits}");
            assert_eq!(budget.allows(charge(&node)), copies > 0, "{limits}");
            assert_eq!(budget.is_limited(), !limits.is_null(), "{limits}");
        }
    }

    #[test]
    fn no_amount_overflows() {
        for name in ["cpu", USD_PER_HOUR] {
            let mut pool = read_pool("p", &json!({"limits": {name: "1E"}})).unwrap();
            pool.usage.set(name, -1);
            let (mut budget, node) = (Budget::of(&pool), capacity(i64::MAX >> 32));
            budget.spend(charge(&node), 1);
            assert!(budget.allows(charge(&node)), "{name}");
        }
    }

    #[test]
    fn spending_and_refunding_are_inverse_and_name_the_exceeded_limit() {
        let mut budget = budget(&json!({"cpu": "4", "nodes": "2", "stowage.dev/usd-per-hour": "0.16"}));
        let [one, three, four, five] = [1, 3, 4, 5].map(capacity);
        assert_eq!([&three, &five].map(|node| budget.exceeded_limit(charge(node))), [None, Some("cpu")]);
        assert_eq!(budget.exceeded_limit(charge(&four)), Some(USD_PER_HOUR));
        budget.spend(charge(&one), 2);
        assert_eq!((budget.allows(charge(&one)), budget.exceeded_limit(charge(&one))), (false, Some("nodes")));
        budget.refund(charge(&one));
        assert_eq!(budget.copies(charge(&one), 9), 1);
        budget.refund(charge(&one));
        assert_eq!(budget.copies(charge(&one), 9), 2);
    }
}
