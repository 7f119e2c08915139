//! The leader's part of the service: the cloud and the reconcilers.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::task::JoinSet;

use crate::api::NodeClaim;
use crate::cli::controller::arguments::ControllerArgs;
use crate::cli::controller::cloud::{Prepared, cloud};
use crate::cli::controller::start_cloud::{Starting, lost, release};
use crate::cloud::simulated::new_instance::IMAGE_ID;
use crate::controllers::context::Settings;
use crate::controllers::derived_state::DerivedState;
use crate::controllers::disruption;
use crate::controllers::enforcement::nominations;
use crate::controllers::interruption::{departure, queue, status_checks};
use crate::controllers::leader::Candidate;
use crate::controllers::node_claim::{
    capacity_reservations, drift, expiration, garbage_collection, lifecycle, tagging,
};
use crate::controllers::node_class::{degraded_apis, reconcile};
use crate::controllers::node_pool::{status, zonal_shift};
use crate::controllers::provisioning::{pod_events, provisioner};
use crate::controllers::{Context, cloud_sync, emergency_stop};
use crate::model::pause;
use crate::server::AppState;
use crate::state::object_ext::NodeClaimExt;
use crate::state::{Cluster, ClusterState, watch};
use crate::telemetry::controllers::ControllerMetrics;

/// Limit of a turn without a response of the API server or AWS.
pub(crate) const TURN_LIMIT: Duration = Duration::from_mins(3);
/// The same of loops that wait for AWS: a call is retried for minutes, and waits for the client's rate limit.
const CLOUD_TURN_LIMIT: Duration = Duration::from_mins(15);
/// How long a new leader waits for the emergency stop. It is unreadable without the right to read its ConfigMap.
const PAUSE_READ: Duration = Duration::from_secs(5);

#[allow(clippy::too_many_arguments)]
pub(crate) fn lead(
    args: &ControllerArgs,
    client: kube::Client,
    evictions: kube::Client,
    mut election: Option<Candidate>,
    cluster: Arc<Cluster>,
    derived: Arc<DerivedState>,
    metrics: ControllerMetrics,
    state: Arc<AppState>,
    mut stopped: tokio::sync::watch::Receiver<bool>,
) -> impl Future<Output = anyhow::Result<()>> + Send + 'static {
    let made = cloud(args);
    let services = !args.plan.scheduler_config.is_empty();
    let settings = Settings {
        placement: args.placement,
        batch_idle: args.batch_idle_duration,
        batch_max: args.batch_max_duration,
        max_purchases_per_minute: args.max_purchases_per_minute,
        max_disruptions_per_minute: args.max_disruptions_per_minute,
        plan: args.plan.settings(),
    };
    async move {
        let prepared = made?;
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
        let mut loops = JoinSet::new();
        let starting = Starting { prepared, client: &client, failed: &metrics.cloud_starts_failed };
        let Some(cloud) = starting.lead_with_cloud(&mut election, &state, &mut stopped, &mut loops).await? else {
            return Ok(());
        };
        if !watch::pause_read(&cluster, PAUSE_READ).await {
            tracing::warn!(config_map = pause::NAME, "could not read the emergency stop, nothing is paused");
        }
        let ctx = Arc::new(Context::new(client, evictions, cluster, derived, cloud, settings, metrics));
        let heartbeats = state.heartbeats.clone();
        let mut start = |name: &'static str, limit: Duration, run: BoxFuture<'static, ()>| {
            loops.spawn(heartbeats.run(name, limit, run));
        };
        // Each of these does nothing when the cloud lacks the capability it needs.
        start("emergency stop", TURN_LIMIT, emergency_stop::run(Arc::clone(&ctx)).boxed());
        start("tagging", CLOUD_TURN_LIMIT, tagging::run(Arc::clone(&ctx)).boxed());
        start("cloud sync", TURN_LIMIT, cloud_sync::run(Arc::clone(&ctx)).boxed());
        start("instance profiles", CLOUD_TURN_LIMIT, garbage_collection::profiles(Arc::clone(&ctx)).boxed());
        start("capacity reservations", CLOUD_TURN_LIMIT, capacity_reservations::run(Arc::clone(&ctx)).boxed());
        start("zonal shift", TURN_LIMIT, zonal_shift::run(Arc::clone(&ctx)).boxed());
        start("degraded APIs", TURN_LIMIT, degraded_apis::run(Arc::clone(&ctx)).boxed());
        start("node classes", CLOUD_TURN_LIMIT, reconcile::run(Arc::clone(&ctx)).boxed());
        start("node pools", TURN_LIMIT, status::run(Arc::clone(&ctx)).boxed());
        start("provisioner", TURN_LIMIT, provisioner::run(Arc::clone(&ctx)).boxed());
        start("invalid pods", TURN_LIMIT, pod_events::report_invalid(Arc::clone(&ctx)).boxed());
        start("lifecycle", TURN_LIMIT, lifecycle::run(Arc::clone(&ctx)).boxed());
        start("nominations", TURN_LIMIT, nominations::run(Arc::clone(&ctx)).boxed());
        start("interruption queue", CLOUD_TURN_LIMIT, queue::run(Arc::clone(&ctx)).boxed());
        start("departure", TURN_LIMIT, departure::run(Arc::clone(&ctx)).boxed());
        start("status checks", CLOUD_TURN_LIMIT, status_checks::run(Arc::clone(&ctx)).boxed());
        start("drift", CLOUD_TURN_LIMIT, drift::run(Arc::clone(&ctx)).boxed());
        start("expiration", TURN_LIMIT, expiration::run(Arc::clone(&ctx)).boxed());
        start("disruption", TURN_LIMIT, disruption::run::run(Arc::clone(&ctx)).boxed());
        start("garbage collection", CLOUD_TURN_LIMIT, garbage_collection::run(Arc::clone(&ctx)).boxed());
        let result = tokio::select! {
            lost = lost(&mut election) => Err(lost),
            ended = loops.join_next() => Err(anyhow::anyhow!("a reconciler ended: {:?}", ended.and_then(Result::err))),
            _ = stopped.wait_for(|stop| *stop) => Ok(()),
        };
        // Nothing may be written after another replica can lead.
        loops.shutdown().await;
        state.metrics.leader.set(0);
        if result.is_ok() {
            release(&mut election).await;
        }
        result
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

    use super::*;
    use crate::test_support::objects;

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
