//! What a plan says.

use std::sync::Arc;

use crate::api::Requirement;
use crate::model::offering::{CapacityType, InstanceType, MicroUsd};
use crate::model::resources::Resources;

/// An offering that can hold all pods of a planned node.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Instance type.
    pub instance_type: Arc<InstanceType>,
    /// Zone.
    pub zone: Arc<str>,
    /// Capacity type.
    pub capacity_type: CapacityType,
    /// Price.
    pub price: MicroUsd,
}

/// A node to buy.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedNode {
    /// Index into [`crate::planner::input::problem::Problem::pools`].
    pub pool: usize,
    /// Offerings that fit, best first (the first is the planned one), never empty; at most 60 instance types. Every
    /// combination of their types, zones and capacity types that is offered is among them.
    /// Shared between the nodes that have the same.
    pub choices: Arc<[Choice]>,
    /// Pods, as indexes into [`crate::planner::input::problem::Problem::pods`].
    pub pods: Vec<usize>,
    /// Requests of its pods and of the daemons that will run there.
    pub requests: Resources,
    /// Requirements on the node beyond type, zone and capacity type (custom labels that its pods pinned).
    pub requirements: Vec<Requirement>,
}

/// Pods that go to a node that exists or is in flight.
#[derive(Clone, Debug, PartialEq)]
pub struct ExistingNodePlacement {
    /// Index into [`crate::planner::input::problem::Problem::nodes`].
    pub node: usize,
    /// Pods, as indexes into [`crate::planner::input::problem::Problem::pods`].
    pub pods: Vec<usize>,
}

/// A pod that no node can hold, and the one reason a person needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Unschedulable {
    /// Index into [`crate::planner::input::problem::Problem::pods`].
    pub pod: usize,
    /// Why, naming NodePools.
    pub reason: String,
}

/// Where every pod of a [`crate::planner::input::problem::Problem`] goes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Nodes to buy.
    pub new_nodes: Vec<PlannedNode>,
    /// Pods that fit what there is.
    pub placements: Vec<ExistingNodePlacement>,
    /// Pods that can't be placed.
    pub unschedulable: Vec<Unschedulable>,
    /// Sum of the planned offerings' prices.
    pub cost: MicroUsd,
    /// No plan of new nodes for these pods can cost less, as far as is known.
    pub lower_bound: Option<MicroUsd>,
}
