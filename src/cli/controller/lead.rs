//! The leader's part of the service: the cloud and the reconcilers.

use std::sync::Arc;

use anyhow::Context as _;

use crate::api::NodeClaim;
use crate::cli::controller::arguments::ControllerArgs;
use crate::cli::controller::cloud::{Connected, cloud};
use crate::cloud::Cloud;
use crate::cloud::ec2;
use crate::cloud::ec2::Ec2Provider;
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
use crate::controllers::{Context, cloud_sync};
use crate::server::AppState;
use crate::state::object_ext::NodeClaimExt;
use crate::state::{Cluster, ClusterState, watch};
use crate::telemetry::controllers::ControllerMetrics;

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
        plan: args.plan.settings(),
    };
    async move {
        // A replica that cannot reach its cloud fails now, not once it leads.
        let connected = made?.connect().await?;
        watch::synced(&cluster, services).await;
        state.readiness.set_caches_synced(true);
        tracing::info!("caches synced");
        if matches!(connected, Connected::Simulated(_))
            && let Some(claim) = real_instance(&cluster.read())
        {
            anyhow::bail!(
                "NodeClaim {claim} has an instance that simulated EC2 did not launch: set --cloud ec2, or delete the NodeClaim with the \
                 controller that launched it"
            );
        }
        if let Some(candidate) = &mut election {
            tokio::select! {
                () = candidate.acquire() => tracing::info!("leading"),
                _ = stopped.wait_for(|stop| *stop) => return Ok(()),
            }
        }
        let mut loops = tokio::task::JoinSet::new();
        let cloud: Arc<dyn Cloud> = match connected {
            Connected::Ec2(made) => {
                let (clients, options) = *made;
                // Loading the region's catalog takes time; the lease is renewed meanwhile.
                let started = tokio::select! {
                    started = Ec2Provider::start(&client, clients, options) => Some(started?),
                    lost = lost(&mut election) => return Err(lost),
                    _ = stopped.wait_for(|stop| *stop) => None,
                };
                let Some(started) = started else {
                    release(&mut election).await;
                    return Ok(());
                };
                let ec2 = Arc::new(started);
                loops.spawn(Arc::clone(&ec2).run(client.clone()));
                ec2::publish(&ec2, state.metrics.registry()).context("registering the EC2 metrics")?;
                ec2
            }
            Connected::Simulated(simulated) => {
                let mut stopped = stopped.clone();
                let shutdown = async move {
                    let _ = stopped.wait_for(|stop| *stop).await;
                };
                tokio::spawn(Arc::clone(&simulated).run(client.clone(), shutdown));
                simulated
            }
        };
        let ctx = Arc::new(Context::new(client, evictions, cluster, derived, cloud, settings, metrics));
        // Each of these does nothing when the cloud lacks the capability it needs.
        loops.spawn(tagging::run(Arc::clone(&ctx)));
        loops.spawn(cloud_sync::run(Arc::clone(&ctx)));
        loops.spawn(garbage_collection::profiles(Arc::clone(&ctx)));
        loops.spawn(capacity_reservations::run(Arc::clone(&ctx)));
        loops.spawn(zonal_shift::run(Arc::clone(&ctx)));
        loops.spawn(degraded_apis::run(Arc::clone(&ctx)));
        loops.spawn(reconcile::run(Arc::clone(&ctx)));
        loops.spawn(status::run(Arc::clone(&ctx)));
        loops.spawn(provisioner::run(Arc::clone(&ctx)));
        loops.spawn(pod_events::report_invalid(Arc::clone(&ctx)));
        loops.spawn(lifecycle::run(Arc::clone(&ctx)));
        loops.spawn(nominations::run(Arc::clone(&ctx)));
        loops.spawn(queue::run(Arc::clone(&ctx)));
        loops.spawn(departure::run(Arc::clone(&ctx)));
        loops.spawn(status_checks::run(Arc::clone(&ctx)));
        loops.spawn(drift::run(Arc::clone(&ctx)));
        loops.spawn(expiration::run(Arc::clone(&ctx)));
        loops.spawn(disruption::run::run(Arc::clone(&ctx)));
        loops.spawn(garbage_collection::run(Arc::clone(&ctx)));
        let result = tokio::select! {
            lost = lost(&mut election) => Err(lost),
            ended = loops.join_next() => Err(anyhow::anyhow!("a reconciler ended: {:?}", ended.and_then(Result::err))),
            _ = stopped.wait_for(|stop| *stop) => Ok(()),
        };
        // Nothing may be written after another replica can lead.
        loops.shutdown().await;
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

/// Renews the lease until it is lost; returns the reason.
async fn lost(election: &mut Option<Candidate>) -> anyhow::Error {
    match election {
        Some(candidate) => {
            let why = candidate.renew().await;
            anyhow::anyhow!("the leader lease was lost: {why}; this replica starts over")
        }
        None => std::future::pending().await,
    }
}

async fn release(election: &mut Option<Candidate>) {
    if let Some(candidate) = election {
        candidate.release().await;
    }
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
