//! The decisions of the loops, called as the loops call them, for the benchmark of the state (`benches/state.rs`): what a pass costs
//! when nothing has to be written.

use std::hint::black_box;
use std::sync::Arc;

use kube::ResourceExt;
use stowage_model::time::UnixMillis;
use stowage_planner::PlanSettings;

use crate::controllers::condition_metrics;
use crate::controllers::derived_state::DerivedState;
use crate::controllers::node_pool::status::desired_status;
use crate::decisions::disruption::marked::MarkedNodes;
use crate::decisions::disruption::{departure, emptiness};
use crate::decisions::gauges::Gauges;
use crate::decisions::lifecycle::claim_queue::Queue;
use crate::decisions::lifecycle::drift::{check, comparable, desired_states, live_claims};
use crate::decisions::lifecycle::expiration::expired;
use crate::decisions::lifecycle::registration_health::RegistrationHealth;
use crate::decisions::placement::extender_view::ViewCache;
use crate::decisions::placement::mode::PlacementMode;
use crate::decisions::placement::nominations::Nominations;
use crate::decisions::placement::planned_taint::PlannedTaints;
use crate::decisions::provisioning::pod_queue::PodQueue;
use crate::decisions::provisioning::purchase_backoff::PurchaseBackoff;
use crate::decisions::provisioning::quarantine::Quarantine;
use crate::extender::View;
use crate::state::ClusterState;
use crate::state::pool_types::{InstanceTypes, ReadyPool};
use crate::state::snapshot::SnapshotRequest;

/// The loops, with their debounce and resync periods in milliseconds.
pub const PART_NAMES: [(&str, u32, u32); 12] = [
    ("provisioning", 20, 1_000),
    ("lifecycle", 20, 500),
    ("nominations", 20, 500),
    ("extender view", 20, 500),
    ("departure", 50, 500),
    ("NodePool status", 500, 5_000),
    ("disruption", 1_000, 1_000),
    ("conditions", 1_000, 10_000),
    ("drift", 2_000, 10_000),
    ("gauges", 5_000, 5_000),
    ("expiration", 10_000, 10_000),
    ("least cost", 20_000, 20_000),
];

/// What the loops remember between two passes.
#[derive(Debug)]
pub struct PureParts {
    derived: DerivedState,
    pods: PodQueue,
    quarantine: Quarantine,
    purchase_backoff: PurchaseBackoff,
    lifecycle: Queue,
    nominations: Nominations,
    taints: PlannedTaints,
    view: ViewCache,
    /// The view that requests read meanwhile.
    published: View,
    marked: MarkedNodes,
    conditions: condition_metrics::Objects,
    settings: PlanSettings,
}

impl PureParts {
    pub fn new(now: UnixMillis) -> Self {
        Self {
            derived: DerivedState::new(true),
            pods: PodQueue::default(),
            quarantine: Quarantine::default(),
            purchase_backoff: PurchaseBackoff::default(),
            lifecycle: Queue::default(),
            nominations: Nominations::new(now),
            taints: PlannedTaints::default(),
            view: ViewCache::default(),
            published: View::default(),
            marked: MarkedNodes::default(),
            conditions: condition_metrics::Objects::default(),
            settings: PlanSettings::default(),
        }
    }

    /// One pass of a loop. Returns the number of things to do.
    pub fn pass(&mut self, part: &str, state: &ClusterState, pools: &[ReadyPool], now: UnixMillis) -> usize {
        let holds = self.derived.holds(state, now);
        match part {
            "provisioning" => {
                let (quarantine, backoff) = (&mut self.quarantine, &mut self.purchase_backoff);
                let demand = self.derived.demand(state, now);
                usize::from(self.pods.observe(state, &holds, &demand, quarantine, backoff, now).is_some())
            }
            "lifecycle" => self.lifecycle.start_due(state, now).len(),
            "nominations" => {
                let mode = PlacementMode::Nominate;
                let closed = self.derived.closed_nodes(state, pools, now);
                let taints = self.taints.choose(state, &holds, &closed, mode, now);
                let actions = self.nominations.choose(state, &holds, mode, now);
                taints.admit.len()
                    + taints.close.len()
                    + taints.change.len()
                    + taints.untaint.len()
                    + actions.nominate.len()
            }
            "extender view" => {
                self.published = self.view.update(state, &holds, now);
                usize::from(self.published.is_stale(now))
            }
            "departure" => {
                if departure::any_marked(state) {
                    departure::due(state, &holds, now).len()
                } else {
                    0
                }
            }
            "NodePool status" => {
                let types = InstanceTypes::new(pools);
                for pool in state.pools.values() {
                    black_box(desired_status(state, &types, pool, &RegistrationHealth::default(), now));
                }
                state.pools.len()
            }
            "disruption" => {
                let facts = self.derived.facts(state, pools);
                let chosen = emptiness::removable(state, &holds, &facts, now);
                let steps = self.marked.empty_steps(state, &holds, now);
                chosen.len() + steps.len() + self.marked.strays(state, now).len()
            }
            "drift" => {
                let ready = |pool: &str| pools.iter().find(|ready| ready.pool.name_any() == pool);
                let desired = desired_states(comparable(state, None), |pool, _| {
                    Some(Arc::clone(&ready(&pool.name_any())?.catalog))
                });
                let claims = live_claims(state);
                for claim in &claims {
                    black_box(check(claim, &desired, now));
                }
                claims.len()
            }
            "gauges" => {
                let facts = self.derived.facts(state, pools);
                black_box(Gauges::of(state, &holds, &facts, now)).usage.len()
            }
            "conditions" => self.conditions.changes(state).count(),
            "expiration" => expired(state, now).0.len(),
            "least cost" => {
                let request = SnapshotRequest { pools, settings: &self.settings, now };
                let claims = state.claims.keys().map(String::as_str);
                black_box(self.derived.simulator(state, request, claims).least_cost());
                state.claims.len()
            }
            other => unreachable!("{other} is no loop"),
        }
    }
}
