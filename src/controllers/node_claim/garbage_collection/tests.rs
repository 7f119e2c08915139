use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::json;
use stowage_api::{Ec2NodeClass, NodeClaim};
use stowage_cloud::{Capabilities, Instance, LaunchError, LaunchRequest, Launched, Message, Override};
use stowage_model::offering::Catalog;
use stowage_test_objects as objects;

use super::*;

/// A cloud with an instance whose claim is created during the query.
struct LateClaim(Arc<Cluster>);

impl Cloud for LateClaim {
    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>> {
        let late = objects::claim("late", &json!({"status": objects::launched("i-2", &["Launched"])}));
        self.0.update(|state| state.apply_claim(late));
        async { Ok(vec![objects::instance("i-2", "unknown", 0), objects::instance("i-3", "unknown", 0)]) }.boxed()
    }

    fn catalog(&self, _: &Ec2NodeClass) -> Arc<Catalog> {
        Arc::default()
    }

    fn mark_unavailable(&self, _: &Override) {}

    fn launch(&self, _: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>> {
        async { Err(LaunchError::Throttled) }.boxed()
    }

    fn describe<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>> {
        async { Ok(None) }.boxed()
    }

    fn terminate<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<bool, CloudError>> {
        async { Ok(false) }.boxed()
    }

    fn receive_messages(&self) -> BoxFuture<'_, Result<Vec<Message>, CloudError>> {
        async { Ok(vec![]) }.boxed()
    }

    fn launched_for<'a>(&'a self, _: &'a NodeClaim) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        async { Ok(vec![]) }.boxed()
    }

    fn delete_messages<'a>(&'a self, _: &'a [String]) -> BoxFuture<'a, Result<(), CloudError>> {
        async { Ok(()) }.boxed()
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::default()
    }
}

#[tokio::test]
async fn c39_the_cloud_is_listed_before_the_cluster() {
    let cluster = Arc::new(Cluster::default());
    let (garbage, _) = compare(&LateClaim(Arc::clone(&cluster)), &cluster).await.unwrap();
    assert_eq!(garbage.leaked, ["aws:///z/i-3"]);
}
