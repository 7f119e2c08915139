//! The input of a plan: plain data, parsed once at the edge.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::input::default_spread::Services;
use crate::input::node::NodeState;
use crate::input::pod::{Daemon, Labels, PodEntry};
use crate::input::pool::Pool;
use crate::input::settings::PlanSettings;
use crate::input::volumes::objects::Volumes;

/// Everything that a plan depends on.
#[derive(Clone, Debug, Default)]
pub struct Problem {
    /// Pods to place.
    pub pods: Vec<PodEntry>,
    /// Nodes, ours and others', launching or running; shared between problems while they stay the same.
    pub nodes: Vec<Arc<NodeState>>,
    /// NodePools that are ready.
    pub pools: Vec<Pool>,
    pub daemons: Vec<Daemon>,
    /// Labels of namespaces by name, for `namespaceSelector`.
    pub namespaces: Arc<BTreeMap<String, Labels>>,
    pub volumes: Arc<Volumes>,
    /// Services, for default topology spread.
    pub services: Arc<Services>,
    pub settings: PlanSettings,
}

impl Problem {
    /// NodePools with their indexes, by name: the order of the input must not change the plan.
    pub(crate) fn pools_by_name(&self) -> impl Iterator<Item = (usize, &Pool)> {
        let mut pools: Vec<_> = self.pools.iter().enumerate().collect();
        pools.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        pools.into_iter()
    }
}
