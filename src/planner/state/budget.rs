//! What NodePools may still buy.

use crate::model::resources::Resources;

/// Room under a NodePool's limits.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    left: Vec<(Limit, i64)>,
    nodes: Option<i64>,
}

/// A resource that a NodePool limits, its name resolved once: limits are asked for with every column tried.
#[derive(Clone, Debug)]
enum Limit {
    Cpu,
    ColumnCache,
    Other(std::sync::Arc<str>),
}

impl Limit {
    fn of(name: &std::sync::Arc<str>) -> Self {
        match name.as_ref() {
            "cpu" => Self::Cpu,
            "memory" => Self::ColumnCache,
            _ => Self::Other(std::sync::Arc::clone(name)),
        }
    }

    fn get(&self, capacity: &Resources) -> i64 {
        match self {
            Self::Cpu => capacity.cpu_milli,
            Self::ColumnCache => capacity.memory,
            Self::Other(name) => capacity.get(name),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Cpu => "cpu",
            Self::ColumnCache => "memory",
            Self::Other(name) => name,
        }
    }
}

impl Budget {
    pub fn of(pool: &crate::planner::input::pool::Pool) -> Self {
        let left = pool.limits.iter().flat_map(|limits| {
            pool.limited.iter().map(|name| (Limit::of(name), limits.get(name) - pool.usage.get(name)))
        });
        Self { left: left.collect(), nodes: pool.node_limit.map(|most| most - pool.node_count) }
    }

    /// Whether anything is limited at all.
    pub fn is_limited(&self) -> bool {
        self.nodes.is_some() || !self.left.is_empty()
    }

    pub fn allows(&self, capacity: &Resources) -> bool {
        self.nodes.is_none_or(|n| n > 0) && self.left.iter().all(|(limit, left)| limit.get(capacity) <= (*left).max(0))
    }

    /// How many more of this capacity, at most `most`.
    pub fn copies(&self, capacity: &Resources, most: usize) -> usize {
        let mut copies = i64::try_from(most).unwrap_or(i64::MAX);
        if let Some(nodes) = self.nodes {
            copies = copies.min(nodes);
        }
        for (limit, left) in &self.left {
            let each = limit.get(capacity);
            if each > 0 {
                copies = copies.min(left / each);
            }
        }
        usize::try_from(copies.max(0)).unwrap_or(0)
    }

    pub fn spend(&mut self, capacity: &Resources, copies: usize) {
        let copies = i64::try_from(copies).unwrap_or(i64::MAX);
        self.nodes = self.nodes.map(|n| n - copies);
        for (limit, left) in &mut self.left {
            *left -= limit.get(capacity) * copies;
        }
    }

    pub fn refund(&mut self, capacity: &Resources) {
        self.nodes = self.nodes.map(|n| n + 1);
        for (limit, left) in &mut self.left {
            *left += limit.get(capacity);
        }
    }

    /// Gives back the count of one node, when only its capacity was to be spent.
    pub fn add_node(&mut self) {
        self.nodes = self.nodes.map(|n| n + 1);
    }

    /// The limit that stops this capacity: its name, and what is left.
    pub fn stopper(&self, capacity: &Resources) -> Option<&str> {
        if self.nodes.is_some_and(|n| n <= 0) {
            return Some("nodes");
        }
        self.left.iter().find(|(limit, left)| limit.get(capacity) > (*left).max(0)).map(|(limit, _)| limit.name())
    }
}
