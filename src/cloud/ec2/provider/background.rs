//! The background loops of the provider.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use stowage_runtime::clock;
use tokio::time::Instant;

use crate::OptionalApi;
use crate::ec2::node_class::cluster_facts;
use crate::ec2::offerings::{placement_scores, refresh, shifted_zones};
use crate::ec2::provider::Ec2Provider;

/// Period of the sweep of launch templates.
const SWEEP: Duration = Duration::from_secs(10);
/// Period of the discovery of the cluster's version and addresses.
const FACTS_PERIOD: Duration = Duration::from_mins(5);
/// Period of the check whether the images behind `@latest` are deprecated.
const DEPRECATION_PERIOD: Duration = Duration::from_mins(30);

impl Ec2Provider {
    /// Refreshes the region, the cluster facts and the launch templates until the process ends.
    pub async fn run(self: Arc<Self>, client: Client) {
        let fresh = refresh::run(Arc::clone(self.offerings.region()), self.apis());
        let (region, risk) = (Arc::clone(self.offerings.region()), Arc::clone(self.offerings.risk()));
        let scores = placement_scores::keep_scoring(region, risk, self.clients.ec2.clone(), &self.degraded_apis);
        let shifts = async {
            if self.options.zonal_shift {
                let cluster = &self.options.cluster_name;
                shifted_zones::watch(&self.clients, cluster, self.offerings.shifts(), &self.degraded_apis).await;
            }
        };
        futures::join!(fresh, scores, shifts, self.sweep(client));
    }

    async fn sweep(&self, client: Client) {
        let (templates, cluster) = (&self.launch_context.templates, &self.options.cluster_name);
        match templates.hydrate(&self.clients, cluster, clock::now()).await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "found launch templates of an earlier process"),
            Err(error) => tracing::warn!(%error, "failed to list launch templates of an earlier process"),
        }
        let (mut discovered, mut checked) = (Instant::now(), Instant::now());
        loop {
            tokio::time::sleep(SWEEP).await;
            self.prewarmer.sweep(clock::now()).await;
            self.instances.prune(clock::now());
            if discovered.elapsed() >= FACTS_PERIOD {
                discovered = Instant::now();
                self.discover_cluster(&client).await;
            }
            if checked.elapsed() >= DEPRECATION_PERIOD {
                checked = Instant::now();
                self.forget_deprecated_images().await;
            }
        }
    }

    async fn discover_cluster(&self, client: &Client) {
        let known = self.node_classes.cluster();
        match cluster_facts::discover(Some(client), &self.clients, &self.options, Some(&known)).await {
            Ok(facts) => {
                self.node_classes.set_cluster(facts);
                self.degraded_apis.record_recovery(OptionalApi::ClusterFacts);
            }
            Err(error) => {
                tracing::warn!(%error, "failed to discover the cluster, keeping the last known facts");
                let note = format!("the last known facts of the cluster are used: {error}");
                self.degraded_apis.record_failure(OptionalApi::ClusterFacts, note);
            }
        }
    }

    async fn forget_deprecated_images(&self) {
        match self.node_classes.parameters().forget_deprecated(&self.clients, clock::now()).await {
            Ok(names) if names.is_empty() => {}
            Ok(names) => {
                tracing::info!(?names, "images of SSM parameters are deprecated, reading the parameters again");
            }
            Err(error) => tracing::warn!(%error, "failed to check images for deprecation, keeping them"),
        }
    }
}
