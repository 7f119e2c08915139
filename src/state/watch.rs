//! Updates the state from watches of the API server.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::api::{Ec2NodeClass, NodeClaim, NodePool};
use crate::model::time::UnixMillis;
use crate::state::cluster::Cluster;
use crate::state::tables::ClusterState;

/// Kinds that must be listed before the first decision.
pub const KINDS: [&str; 11] = [
    "pods",
    "nodes",
    "nodeclaims",
    "nodepools",
    "ec2nodeclasses",
    "daemonsets",
    "namespaces",
    "persistentvolumeclaims",
    "persistentvolumes",
    "storageclasses",
    "csinodes",
];

/// Seconds after which the API server ends a watch, and it is started again. A dead connection is noticed five seconds later.
pub const WATCH_SECONDS: u32 = 60;

/// Listed in addition to [`KINDS`] when pods get default topology spread constraints.
const SERVICES: &str = "services";

/// Starts every watch, that of Services only on request. Watches retry with backoff until the process ends. `clock` returns the
/// current time.
pub fn start(client: &Client, cluster: &Arc<Cluster>, services: bool, clock: fn() -> UnixMillis) {
    if services {
        feed(
            cluster,
            SERVICES,
            Api::<Service>::all(client.clone()),
            |state, service| state.apply_service(&service),
            |state, key| Arc::make_mut(&mut state.services).delete(key),
            |state| state.services.keys(),
        );
    }
    feed(
        cluster,
        "pods",
        Api::<Pod>::all(client.clone()),
        move |state, pod| state.apply_pod(&pod, clock()),
        move |state, key| state.delete_pod(key, clock()),
        |state| state.pods.keys().cloned().collect(),
    );
    feed(
        cluster,
        "nodes",
        Api::<Node>::all(client.clone()),
        ClusterState::apply_node,
        ClusterState::delete_node,
        |state| state.nodes.keys().cloned().collect(),
    );
    feed(
        cluster,
        "nodeclaims",
        Api::<NodeClaim>::all(client.clone()),
        ClusterState::apply_claim,
        ClusterState::delete_claim,
        |state| state.claims.keys().chain(state.foreign_claims.keys()).cloned().collect(),
    );
    feed(
        cluster,
        "nodepools",
        Api::<NodePool>::all(client.clone()),
        ClusterState::apply_pool,
        |state, key| {
            state.pools.remove(key);
        },
        |state| state.pools.keys().cloned().collect(),
    );
    feed(
        cluster,
        "ec2nodeclasses",
        Api::<Ec2NodeClass>::all(client.clone()),
        |state, class| {
            state.classes.insert(class.name_any(), Arc::new(class));
        },
        |state, key| {
            state.classes.remove(key);
        },
        |state| state.classes.keys().cloned().collect(),
    );
    feed(
        cluster,
        "daemonsets",
        Api::<DaemonSet>::all(client.clone()),
        |state, set| state.apply_daemon_set(&set),
        ClusterState::delete_daemon_set,
        |state| state.daemons.keys().cloned().collect(),
    );
    feed(
        cluster,
        "namespaces",
        Api::<Namespace>::all(client.clone()),
        |state, namespace| state.apply_namespace(&namespace),
        |state, key| {
            Arc::make_mut(&mut state.namespaces).remove(key);
        },
        |state| state.namespaces.keys().cloned().collect(),
    );
    start_volumes(client, cluster);
}

fn start_volumes(client: &Client, cluster: &Arc<Cluster>) {
    feed(
        cluster,
        "persistentvolumeclaims",
        Api::<PersistentVolumeClaim>::all(client.clone()),
        |state, object| state.apply_volume_claim(&object),
        |state, key| {
            Arc::make_mut(&mut state.volumes).claims.remove(key);
        },
        |state| state.volumes.claims.keys().cloned().collect(),
    );
    feed(
        cluster,
        "persistentvolumes",
        Api::<PersistentVolume>::all(client.clone()),
        |state, object| state.apply_volume(&object),
        |state, key| {
            Arc::make_mut(&mut state.volumes).volumes.remove(key);
        },
        |state| state.volumes.volumes.keys().cloned().collect(),
    );
    feed(
        cluster,
        "storageclasses",
        Api::<StorageClass>::all(client.clone()),
        |state, object| state.apply_storage_class(&object),
        |state, key| {
            Arc::make_mut(&mut state.volumes).classes.remove(key);
        },
        |state| state.volumes.classes.keys().cloned().collect(),
    );
    feed(
        cluster,
        "csinodes",
        Api::<CSINode>::all(client.clone()),
        |state, object| state.apply_csi_node(&object),
        |state, key| {
            Arc::make_mut(&mut state.volumes).limits.remove(key);
        },
        |state| state.volumes.limits.keys().cloned().collect(),
    );
}

/// Spawns one watch. `known` returns the keys in the table, so that a new listing deletes objects that are not on it.
fn feed<K>(
    cluster: &Arc<Cluster>,
    kind: &'static str,
    api: Api<K>,
    apply: impl Fn(&mut ClusterState, K) + Send + 'static,
    delete: impl Fn(&mut ClusterState, &str) + Send + 'static,
    known: impl Fn(&ClusterState) -> BTreeSet<String> + Send + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let cluster = Arc::clone(cluster);
    tokio::spawn(async move {
        let stream = watch(api, watcher::Config::default().timeout(WATCH_SECONDS)).default_backoff();
        let mut stream = pin!(stream);
        let (mut before, mut listed) = (BTreeSet::new(), BTreeSet::new());
        while let Some(event) = stream.next().await {
            match event {
                // An object that a write adds during the listing is newer than the listing and must not be deleted by it.
                Ok(Event::Init) => (before, listed) = (known(&cluster.read()), BTreeSet::new()),
                Ok(Event::InitApply(object)) => {
                    listed.insert(key(&object));
                    cluster.update(|state| apply(state, object));
                }
                Ok(Event::InitDone) => cluster.update(|state| {
                    for gone in before.difference(&listed) {
                        delete(state, gone);
                    }
                    state.synced.insert(kind);
                }),
                Ok(Event::Apply(object)) => cluster.update(|state| apply(state, object)),
                Ok(Event::Delete(object)) => cluster.update(|state| delete(state, &key(&object))),
                Err(error) => tracing::warn!(kind, %error, "watch failed, retrying"),
            }
        }
    });
}

fn key<K: Resource<DynamicType = ()>>(object: &K) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}

/// Waits until every watched kind has been listed once.
pub async fn synced(cluster: &Cluster, services: bool) {
    let mut changes = cluster.changes();
    while cluster.read().synced.len() < KINDS.len() + usize::from(services) {
        if changes.changed().await.is_err() {
            return;
        }
    }
}
