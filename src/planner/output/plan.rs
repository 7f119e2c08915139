//! The plan: the result of the solver, in terms of the problem's indexes.

use std::sync::Arc;

use stowage_api::Requirement;
use stowage_model::labels::{self, normalize_key};
use stowage_model::offering::{CapacityType, InstanceType, Offering};
use stowage_model::resources::Resources;
use stowage_model::units::MicroUsd;

use crate::columns::dims::real;
use crate::patterns::proof::Proof;

/// An offering that can hold all pods of a planned node.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    pub instance_type: Arc<InstanceType>,
    pub zone: Arc<str>,
    pub capacity_type: CapacityType,
    /// Price as paid.
    pub price: MicroUsd,
}

impl Choice {
    /// The value of a label of a node that is launched as this offering.
    pub fn label(&self, key: &str) -> Option<&str> {
        match normalize_key(key) {
            labels::INSTANCE_TYPE => Some(&self.instance_type.name),
            labels::ZONE => Some(&self.zone),
            labels::CAPACITY_TYPE => Some(self.capacity_type.as_str()),
            key => self.instance_type.labels.get(key).map(String::as_str).or_else(|| {
                let same =
                    |offering: &&Offering| offering.zone == self.zone && offering.capacity_type == self.capacity_type;
                self.instance_type.offerings.iter().find(same)?.label(key)
            }),
        }
    }
}

/// A node to purchase.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedNode {
    /// Index into [`crate::input::problem::Problem::pools`].
    pub pool: usize,
    /// Offerings that fit: the planned offering first, then the others by price. Never empty, at most 60 instance types. Every offered
    /// combination of their types, zones and capacity types is among them. Shared between nodes with equal choices.
    pub choices: Arc<[Choice]>,
    /// The most that a launch may cost. `None`: whatever the choices cost.
    pub max_price: Option<MicroUsd>,
    /// Pods, as indexes into [`crate::input::problem::Problem::pods`].
    pub pods: Vec<usize>,
    /// Requests of its pods and of the daemons that run on every choice.
    pub requests: Resources,
    /// Requirements on the node beyond type, zone and capacity type, such as custom labels that its pods pinned.
    pub requirements: Vec<Requirement>,
}

/// Pods placed on a node that exists or is launching.
#[derive(Clone, Debug, PartialEq)]
pub struct ExistingNodePlacement {
    /// Index into [`crate::input::problem::Problem::nodes`].
    pub node: usize,
    /// Pods, as indexes into [`crate::input::problem::Problem::pods`].
    pub pods: Vec<usize>,
}

/// A pod that no node can hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Unschedulable {
    /// Index into [`crate::input::problem::Problem::pods`].
    pub pod: usize,
    /// One line for the pod's event, with the reasons of the NodePools.
    pub reason: String,
}

/// The placement of every pod of a [`crate::input::problem::Problem`]. Each pod is in exactly one of the three lists.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub new_nodes: Vec<PlannedNode>,
    pub placements: Vec<ExistingNodePlacement>,
    pub unschedulable: Vec<Unschedulable>,
    /// Sum of the planned offerings' prices per hour.
    pub cost: MicroUsd,
    /// Lower bound on the cost of any plan of new nodes for these pods; `None` where no valid bound is known.
    pub lower_bound: Option<MicroUsd>,
    /// Whether no plan for these pods costs less: the bound reaches the cost, and every pod is placed.
    pub optimal: bool,
    /// What may still be proven of it, unless it is optimal.
    pub proof: Option<Box<Proof>>,
}

impl Plan {
    /// Raises its lower bound as far as that can be proven, of a plan as it was made. Takes up to about 50 ms, with `--prove` a second. Nodes and pods
    /// do not change.
    pub fn prove(&mut self) {
        if let Some(proof) = self.proof.take() {
            let known = self.lower_bound.map_or(0.0, |bound| real(bound.0));
            self.raise_bound(proof.raise(known, self.cost.0));
        }
    }

    /// Raises its lower bound to this one, in micro-USD per hour as of the LP.
    pub(crate) fn raise_bound(&mut self, bound: f64) {
        let bound = rounded_down(bound);
        // A plan that leaves pods out may cost less than the bound for all pods: then the bound says nothing.
        let is_complete = self.unschedulable.is_empty();
        debug_assert!(!is_complete || bound <= self.cost, "{bound:?} is no bound of {:?}", self.cost);
        self.lower_bound = self.lower_bound.max(Some(bound).filter(|bound| *bound <= self.cost));
        // The bound is rounded down.
        let reached = self.lower_bound.is_some_and(|bound| self.cost.0 <= bound.0 + 1);
        // Other pods on the existing nodes could leave cheaper ones.
        let fixed = self.placements.is_empty() || self.new_nodes.is_empty();
        self.optimal = reached && fixed && is_complete;
        if self.optimal {
            self.lower_bound = Some(self.cost);
        }
    }

    /// The pods of the three lists, as indexes into [`crate::input::problem::Problem::pods`].
    pub fn pods(&self) -> impl Iterator<Item = usize> {
        let on_new = self.new_nodes.iter().flat_map(|node| &node.pods);
        let on_existing = self.placements.iter().flat_map(|placement| &placement.pods);
        on_new.chain(on_existing).copied().chain(self.unschedulable.iter().map(|left_out| left_out.pod))
    }
}

/// A lower bound of the LP, in micro-USD per hour, less what its precision may have added.
#[allow(clippy::cast_possible_truncation)]
pub(crate) fn rounded_down(bound: f64) -> MicroUsd {
    MicroUsd((bound * (1.0 - 1e-9)).floor() as i64)
}
