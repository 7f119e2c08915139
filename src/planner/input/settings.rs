//! Settings of a plan.

use std::collections::BTreeMap;

use stowage_model::units::{MicroUsd, Millicores};

/// How preferences are treated (`--preference-policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreferencePolicy {
    /// Treated as required, relaxed one by one where they cannot be satisfied.
    #[default]
    Respect,
    Ignore,
}

/// How `minValues` is treated (`--min-values-policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MinValuesPolicy {
    /// Must be satisfied.
    #[default]
    Strict,
    /// Lowered to the number of values that are available.
    BestEffort,
}

/// Bounds on the size of a new node, each inclusive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeSizes {
    pub least_vcpus: Option<i64>,
    pub most_vcpus: Option<i64>,
}

impl NodeSizes {
    /// Whether a node with this much CPU is within the bounds.
    pub fn allow(&self, cpu: Millicores) -> bool {
        self.least_vcpus.is_none_or(|least| cpu.0 >= least.saturating_mul(1000))
            && self.most_vcpus.is_none_or(|most| cpu.0 <= most.saturating_mul(1000))
    }
}

/// Settings of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanSettings {
    pub preference_policy: PreferencePolicy,
    pub min_values_policy: MinValuesPolicy,
    pub node_sizes: NodeSizes,
    /// Fixed cost per node in the objective, per hour; never paid.
    pub node_penalty: MicroUsd,
    /// Worth of an instance family in the objective, in percent; 100 for a family without an entry.
    pub family_weights: BTreeMap<String, i64>,
    /// Spot and reserved capacity before on-demand, whatever the price.
    pub prefer_spot: bool,
    /// Maximum pods of one controller on one node.
    pub workload_pods_per_node: Option<i32>,
    /// Whether to spend seconds on cheaper nodes, and on a lower bound that proves more.
    pub prove: bool,
}

impl PlanSettings {
    /// The coefficient of a price in the objective: the price divided by its family's weight, plus the node penalty.
    pub fn compared_price(&self, price: MicroUsd, family: Option<&str>) -> i64 {
        let weight = family.and_then(|family| self.family_weights.get(family)).copied().unwrap_or(100).max(1);
        let weighted = i128::from(price.0.max(0)) * 100 / i128::from(weight);
        i64::try_from(weighted).unwrap_or(i64::MAX).saturating_add(self.node_penalty.0.max(0))
    }
}
