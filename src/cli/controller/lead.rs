//! The leader's part of the service: the cloud and the reconcilers.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use prometheus::IntCounterVec;
use stowage_api::NodeClaim;
use stowage_cloud::simulated::IMAGE_ID;
use stowage_model::pause;
use stowage_runtime::sync::heartbeat::Heartbeats;
use stowage_runtime::telemetry::controllers::ControllerMetrics;
use tokio::task::JoinSet;

use crate::cli::controller::arguments::ControllerArgs;
use crate::cli::controller::cloud_setup::{Prepared, cloud};
use crate::cli::controller::start_cloud::{Starting, lost};
use crate::controllers::context::{Clients, Settings};
use crate::controllers::debug_state::sources::DebugSources;
use crate::controllers::derived_state::DerivedState;
use crate::controllers::disruption;
use crate::controllers::enforcement::{nominated_events, nominations, planned_taint};
use crate::controllers::event_recorder::EventRecorder;
use crate::controllers::interruption::{queue, unhealthy_instances};
use crate::controllers::leader::LeaderCandidate;
use crate::controllers::leader::other_leader::report;
use crate::controllers::node_claim::{
    capacity_reservations, consistency, drift, expiration, garbage_collection, instance_tags, lifecycle,
    price_annotations, repair,
};
use crate::controllers::node_class::{degraded_apis, reconcile};
use crate::controllers::node_pool::{no_instance_types, status, zonal_shift};
use crate::controllers::provisioning::{pod_events, provisioner};
use crate::controllers::static_pools::scale;
use crate::controllers::supervise::supervised;
use crate::controllers::{
    Context, cloud_sync, condition_metrics, emergency_stop, gauges, node_series, object_events, pod_series,
    unsupported_kinds,
};
use crate::decisions::provisioning::batch_window::BatchLimits;
use crate::server::AppState;
use crate::state::object_ext::NodeClaimExt;
use crate::state::{Cluster, ClusterState, watch};

/// Limit of a turn without a response of the API server or AWS.
pub(crate) const TURN_LIMIT: Duration = Duration::from_mins(3);
/// The same of loops that wait for AWS: a call is retried for minutes, and waits for the client's rate limit.
const CLOUD_TURN_LIMIT: Duration = Duration::from_mins(15);
/// How often a replica that has not read the emergency stop reports it. Without the right to read it, nothing is paused.
const PAUSE_READ: Duration = Duration::from_secs(5);
/// Time to open the nodes that are closed while pods move. The shutdown allows five seconds, which the release of the lease needs, too.
const OPENING: Duration = Duration::from_secs(2);

#[allow(clippy::too_many_arguments)]
pub(crate) fn lead(
    args: &ControllerArgs,
    clients: Clients,
    election: LeaderCandidate,
    cluster: Arc<Cluster>,
    derived: Arc<DerivedState>,
    debug: Arc<DebugSources>,
    metrics: ControllerMetrics,
    state: Arc<AppState>,
    mut stopped: tokio::sync::watch::Receiver<bool>,
) -> impl Future<Output = anyhow::Result<()>> + Send + 'static {
    let made = cloud(args);
    let unknown_gates = args.aws.unknown_gates().join(",");
    let has_object_series = !args.disable_cluster_state_observability;
    let services = !args.plan.scheduler_config.is_empty();
    let component = args.reporting_component.clone();
    let settings = Settings {
        placement: args.placement,
        batch: BatchLimits::new(args.batch_idle_duration, args.batch_max_duration),
        max_purchases_per_minute: args.max_purchases_per_minute,
        max_disruptions_per_minute: args.max_disruptions_per_minute,
        max_evictions_per_second: usize::from(args.max_evictions_per_second),
        node_repair: args.aws.node_repair(),
        static_capacity: args.aws.static_capacity(),
        spot_to_spot: args.aws.spot_to_spot(),
        reporting_component: component.clone(),
        plan: args.plan.settings(),
    };
    async move {
        let prepared = made?;
        if !unknown_gates.is_empty() {
            tracing::warn!(unknown_gates, "feature gates that this version does not know have no effect");
        }
        watch::synced(&cluster, services).await;
        state.readiness.set_caches_synced(true);
        tracing::info!("caches synced");
        if matches!(prepared, Prepared::Simulated(_))
            && let Some(claim) = real_instance(&cluster.read())
        {
            anyhow::bail!(
                "NodeClaim {claim} has an instance that simulated EC2 did not launch: set --cloud ec2, or delete the NodeClaim with the \
                 controller that launched it"
            );
        }
        // A leader that does not know the emergency stop would act in spite of it.
        while !watch::pause_read(&cluster, PAUSE_READ).await {
            tracing::warn!(config_map = pause::NAME, "could not read the emergency stop, this replica does not lead");
            if *stopped.borrow() {
                return Ok(());
            }
        }
        let mut tasks = JoinSet::new();
        let starting = Starting { prepared, client: &clients.writes, failed: &metrics.cloud_starts_failed };
        let recorder = EventRecorder::new(clients.writes.clone(), component);
        let started = tokio::select! {
            started = starting.lead_with_cloud(&election, &state, &mut stopped, &mut tasks) => started?,
            never = report(election.other(), recorder, &cluster) => match never {},
        };
        let Some(cloud) = started else { return Ok(()) };
        let ctx = Arc::new(Context::new(clients, cluster, derived, cloud, settings, metrics));
        debug.set_leader(&ctx);
        if has_object_series {
            let cluster = Arc::clone(&ctx.cluster);
            state.series.set_source(move || {
                let nodes = node_series::text(Arc::clone(&cluster));
                nodes.chain(pod_series::text(Arc::clone(&cluster))).chain(condition_metrics::text(&cluster)).boxed()
            });
        }
        let mut loops =
            Loops { tasks, ctx, heartbeats: state.heartbeats.clone(), panics: state.metrics.loop_panics.clone() };
        // Each of these does nothing when the cloud lacks the capability it needs.
        loops.start("emergency stop", TURN_LIMIT, emergency_stop::run);
        loops.start("tagging", CLOUD_TURN_LIMIT, instance_tags::run);
        loops.start("cloud sync", TURN_LIMIT, cloud_sync::run);
        loops.start("instance profiles", CLOUD_TURN_LIMIT, garbage_collection::profiles);
        loops.start("capacity reservations", CLOUD_TURN_LIMIT, capacity_reservations::run);
        loops.start("zonal shift", TURN_LIMIT, zonal_shift::run);
        loops.start("degraded APIs", TURN_LIMIT, degraded_apis::run);
        loops.start("node classes", CLOUD_TURN_LIMIT, reconcile::run);
        loops.start("node pools", TURN_LIMIT, status::run);
        loops.start("no instance types", TURN_LIMIT, no_instance_types::run);
        loops.start("unsupported kinds", TURN_LIMIT, unsupported_kinds::run);
        loops.start("provisioner", TURN_LIMIT, provisioner::run);
        loops.start("static node pools", TURN_LIMIT, scale::run);
        loops.start("pod events", TURN_LIMIT, pod_events::report);
        loops.start("lifecycle", TURN_LIMIT, lifecycle::run);
        loops.start("planned taints", TURN_LIMIT, planned_taint::run);
        loops.start("nominations", TURN_LIMIT, nominations::run);
        loops.start("nominated events", TURN_LIMIT, nominated_events::run);
        loops.start("object events", TURN_LIMIT, object_events::run);
        loops.start("interruption queue", CLOUD_TURN_LIMIT, queue::run);
        loops.start("departure", TURN_LIMIT, disruption::departure::run);
        loops.start("status checks", CLOUD_TURN_LIMIT, unhealthy_instances::run);
        loops.start("drift", CLOUD_TURN_LIMIT, drift::run);
        loops.start("expiration", TURN_LIMIT, expiration::run);
        loops.start("consistency", TURN_LIMIT, consistency::run);
        loops.start("prices", TURN_LIMIT, price_annotations::run);
        loops.start("node repair", TURN_LIMIT, repair::run);
        loops.start("disruption", TURN_LIMIT, disruption::run::run);
        loops.start("replacement", TURN_LIMIT, disruption::replacement::run);
        loops.start("consolidatable", TURN_LIMIT, disruption::consolidatable::run);
        loops.start("moves", TURN_LIMIT, disruption::advance::run);
        loops.start("gauges", TURN_LIMIT, gauges::run);
        loops.start("least cost", TURN_LIMIT, disruption::least_cost::run);
        if has_object_series {
            loops.start("conditions", TURN_LIMIT, condition_metrics::run);
        }
        loops.start("garbage collection", CLOUD_TURN_LIMIT, garbage_collection::run);
        let result = tokio::select! {
            lost = lost(&election) => Err(lost),
            ended = loops.tasks.join_next() => Err(anyhow::anyhow!("a reconciler ended: {:?}", ended.and_then(Result::err))),
            _ = stopped.wait_for(|stop| *stop) => Ok(()),
        };
        // Nothing may be written after another replica can lead.
        loops.tasks.shutdown().await;
        if result.is_ok() && tokio::time::timeout(OPENING, planned_taint::open_all(&loops.ctx)).await.is_err() {
            tracing::warn!("nodes that are closed while pods move could not be opened, the next leader opens them");
        }
        state.set_leading(false);
        if result.is_ok() {
            election.release().await;
        }
        result
    }
}

/// The leader's loops.
struct Loops {
    tasks: JoinSet<()>,
    ctx: Arc<Context>,
    heartbeats: Heartbeats,
    panics: IntCounterVec,
}

impl Loops {
    /// Starts a loop whose turns may take up to `limit`.
    fn start<F>(&mut self, name: &'static str, limit: Duration, run: fn(Arc<Context>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let ctx = Arc::clone(&self.ctx);
        let run = supervised(name, self.panics.clone(), move || run(Arc::clone(&ctx)));
        self.tasks.spawn(self.heartbeats.run(name, limit, run));
    }
}

/// A NodeClaim whose instance simulated EC2 did not launch: it would take the instance for terminated, and leave it running and billed.
fn real_instance(state: &ClusterState) -> Option<String> {
    let launched = state.claims.iter().filter(|(_, claim)| claim.provider_id().is_some());
    let image = |claim: &NodeClaim| claim.status.as_ref().and_then(|status| status.image_id.clone());
    let ours = launched.filter(|(_, claim)| image(claim).as_deref() != Some(IMAGE_ID)).map(|(name, _)| name);
    ours.chain(state.foreign_claims.keys()).next().cloned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn simulated_ec2_does_not_lead_where_real_instances_run() {
        let mut state = ClusterState::default();
        let status = |image: &str| json!({"status": {"providerID": "aws:///z/i-1", "imageID": image}});
        state.apply_claim(objects::claim("unlaunched", &json!({})));
        state.apply_claim(objects::claim("simulated", &status(IMAGE_ID)));
        assert_eq!(real_instance(&state), None);
        let mut other = status("ami-1");
        other["spec"] = json!({"nodeClassRef": {"group": "eks.amazonaws.com", "kind": "NodeClass", "name": "n"}});
        state.apply_claim(objects::claim("auto", &other));
        assert_eq!(real_instance(&state).as_deref(), Some("auto"));
        state.apply_claim(objects::claim("karpenter", &status("ami-1")));
        assert_eq!(real_instance(&state).as_deref(), Some("karpenter"));
    }
}
