//! Updates the state from watches of the API server.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{
    ConfigMap, LimitRange, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, Service,
};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::pause;
use stowage_model::pause::Pause;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::heartbeat::{self, Heartbeats};
use stowage_runtime::sync::panics::catch;

use crate::state::cluster::Cluster;
use crate::state::kinds::{KINDS, SERVICES};
use crate::state::tables::ClusterState;

/// Seconds after which the API server ends a watch, and it is started again. A dead connection is noticed five seconds later. An idle
/// watch gets a bookmark two seconds before: twice within [`MAX_AGE`](crate::state::watch_signs::MAX_AGE).
pub const WATCH_SECONDS: u32 = 30;

/// Starts the watches. The client records every event and bookmark in [`Cluster::watch_signs`]: the watcher does not report bookmarks.
#[derive(Debug)]
pub struct Watches<'a> {
    pub cluster: &'a Arc<Cluster>,
    pub heartbeats: &'a Heartbeats,
    /// The current time.
    pub clock: fn() -> UnixMillis,
}

/// A watch without an event, a bookmark or an error for this long is stuck: the API server ends it after [`WATCH_SECONDS`], and attempts
/// to start it again have time limits.
const STUCK_AFTER: Duration = Duration::from_mins(3);

impl Watches<'_> {
    /// Starts every watch, that of Services only on request. Watches retry with backoff until the process ends.
    pub fn start(&self, client: &Client, services: bool) {
        let clock = self.clock;
        if services {
            self.feed(
                SERVICES,
                Api::<Service>::all(client.clone()),
                |state, service| state.apply_service(&service),
                |state, key| Arc::make_mut(&mut state.services).delete(key),
                |state| state.services.keys(),
            );
        }
        self.feed(
            "pods",
            Api::<Pod>::all(client.clone()),
            move |state, pod| state.apply_pod(&pod, clock()),
            move |state, key| state.delete_pod(key, clock()),
            |state| state.pods.keys().cloned().collect(),
        );
        self.feed(
            "nodes",
            Api::<Node>::all(client.clone()),
            ClusterState::apply_node,
            ClusterState::delete_node,
            |state| state.nodes.keys().cloned().collect(),
        );
        self.feed(
            "nodeclaims",
            Api::<NodeClaim>::all(client.clone()),
            ClusterState::apply_claim,
            ClusterState::delete_claim,
            |state| state.claims.keys().chain(state.foreign_claims.keys()).cloned().collect(),
        );
        self.feed(
            "nodepools",
            Api::<NodePool>::all(client.clone()),
            ClusterState::apply_pool,
            |state, key| {
                state.pools.remove(key);
            },
            |state| state.pools.keys().cloned().collect(),
        );
        self.feed(
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
        self.feed(
            "daemonsets",
            Api::<DaemonSet>::all(client.clone()),
            |state, set| state.apply_daemon_set(&set),
            |state, key| state.daemons.delete(key),
            |state| state.daemons.keys().cloned().collect(),
        );
        self.feed(
            "limitranges",
            Api::<LimitRange>::all(client.clone()),
            |state, limit_range| state.apply_limit_range(&limit_range),
            ClusterState::delete_limit_range,
            |state| state.daemons.limit_range_keys(),
        );
        self.feed(
            "poddisruptionbudgets",
            Api::<PodDisruptionBudget>::all(client.clone()),
            |state, budget| state.pod_budgets.apply(&budget),
            |state, key| state.pod_budgets.delete(key),
            |state| state.pod_budgets.keys(),
        );
        self.feed(
            "namespaces",
            Api::<Namespace>::all(client.clone()),
            |state, namespace| state.apply_namespace(&namespace),
            |state, key| {
                Arc::make_mut(&mut state.namespaces).remove(key);
            },
            |state| state.namespaces.keys().cloned().collect(),
        );
        self.start_volumes(client);
    }

    fn start_volumes(&self, client: &Client) {
        self.feed(
            "persistentvolumeclaims",
            Api::<PersistentVolumeClaim>::all(client.clone()),
            |state, object| state.apply_volume_claim(&object),
            |state, key| {
                Arc::make_mut(&mut state.volumes).claims.remove(key);
            },
            |state| state.volumes.claims.keys().cloned().collect(),
        );
        self.feed(
            "persistentvolumes",
            Api::<PersistentVolume>::all(client.clone()),
            |state, object| state.apply_volume(&object),
            |state, key| {
                Arc::make_mut(&mut state.volumes).volumes.remove(key);
            },
            |state| state.volumes.volumes.keys().cloned().collect(),
        );
        self.feed(
            "storageclasses",
            Api::<StorageClass>::all(client.clone()),
            |state, object| state.apply_storage_class(&object),
            |state, key| {
                Arc::make_mut(&mut state.volumes).classes.remove(key);
            },
            |state| state.volumes.classes.keys().cloned().collect(),
        );
        self.feed(
            "csinodes",
            Api::<CSINode>::all(client.clone()),
            |state, object| state.apply_csi_node(&object),
            |state, key| {
                Arc::make_mut(&mut state.volumes).limits.remove(key);
            },
            |state| state.volumes.limits.keys().cloned().collect(),
        );
        self.feed(
            "volumeattachments",
            Api::<VolumeAttachment>::all(client.clone()),
            |state, object| state.attachments.apply(&object),
            |state, key| state.attachments.delete(key),
            |state| state.attachments.keys(),
        );
    }

    /// Spawns one watch. `known` returns the keys in the table, so that a new listing deletes objects that are not on it.
    fn feed<K>(
        &self,
        kind: &'static str,
        api: Api<K>,
        apply: impl Fn(&mut ClusterState, K) + Send + 'static,
        delete: impl Fn(&mut ClusterState, &str) + Send + 'static,
        known: impl Fn(&ClusterState) -> BTreeSet<String> + Send + 'static,
    ) where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (cluster, clock) = (Arc::clone(self.cluster), self.clock);
        tokio::spawn(self.heartbeats.run(kind, STUCK_AFTER, async move {
            let stream = watch(api, watcher::Config::default().timeout(WATCH_SECONDS)).default_backoff();
            let mut stream = pin!(stream);
            let (mut before, mut listed) = (BTreeSet::new(), BTreeSet::new());
            let mut table = Table { kind, cluster: &cluster, clock, left_out: BTreeSet::new() };
            while let Some(event) = stream.next().await {
                heartbeat::progress();
                match event {
                    // An object that a write adds during the listing is newer than the listing and must not be deleted by it.
                    Ok(Event::Init) => (before, listed) = (known(&cluster.read()), BTreeSet::new()),
                    Ok(Event::InitApply(object)) => {
                        listed.insert(key(&object));
                        table.change(&key(&object), |state| apply(state, object));
                    }
                    Ok(Event::InitDone) => {
                        for gone in before.difference(&listed) {
                            table.change(gone, |state| delete(state, gone));
                        }
                        table.retain(&listed);
                        cluster.update(|state| state.synced.insert(kind));
                        cluster.watch_signs().record_list(kind, clock());
                    }
                    Ok(Event::Apply(object)) => table.change(&key(&object), |state| apply(state, object)),
                    Ok(Event::Delete(object)) => table.change(&key(&object), |state| delete(state, &key(&object))),
                    Err(error) => tracing::warn!(kind, %error, "watch failed, retrying"),
                }
            }
        }));
    }
}

/// The table of a watched kind.
struct Table<'a> {
    kind: &'static str,
    cluster: &'a Cluster,
    clock: fn() -> UnixMillis,
    /// Keys of the objects whose last change panicked.
    left_out: BTreeSet<String>,
}

impl Table<'_> {
    /// Applies a change of one object. A panic over it is reported, and affects no other object.
    fn change(&mut self, key: &str, change: impl FnOnce(&mut ClusterState)) {
        match self.cluster.update(|state| catch(|| change(state))) {
            Err(panic) => {
                tracing::error!(kind = self.kind, key, %panic, "change of a watched object panicked, leaving it out");
                self.left_out.insert(key.to_owned());
                self.cluster.watch_signs().record_panic(self.kind, (self.clock)());
            }
            Ok(()) if self.left_out.remove(key) => self.report_complete(),
            Ok(()) => {}
        }
    }

    /// Forgets the objects that are not on a complete list.
    fn retain(&mut self, listed: &BTreeSet<String>) {
        let before = self.left_out.len();
        self.left_out.retain(|key| listed.contains(key));
        if self.left_out.len() < before {
            self.report_complete();
        }
    }

    fn report_complete(&self) {
        if self.left_out.is_empty() {
            self.cluster.watch_signs().record_complete(self.kind);
        }
    }
}

fn key<K: Resource<DynamicType = ()>>(object: &K) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}

/// Wait after the API server denied the right to read the emergency stop.
const FORBIDDEN_RETRY: Duration = Duration::from_secs(30);

/// Watches the emergency stop: the ConfigMap [`pause::NAME`] in `namespace`. While it cannot be read, the last known value holds; without
/// the right to read it, and before it was read, nothing is paused. Each time it was read, `log_level` gets its value of
/// [`pause::LOG_LEVEL_KEY`].
pub fn start_pause(
    client: &Client,
    cluster: &Arc<Cluster>,
    namespace: &str,
    log_level: impl Fn(Option<&str>) + Send + Sync + 'static,
) {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let cluster = Arc::clone(cluster);
    tokio::spawn(async move {
        let config =
            watcher::Config::default().fields(&format!("metadata.name={}", pause::NAME)).timeout(WATCH_SECONDS);
        let mut stream = pin!(watch(api, config).default_backoff());
        let mut listed = None;
        while let Some(event) = stream.next().await {
            let data = match event {
                Ok(Event::Init) => {
                    listed = None;
                    continue;
                }
                Ok(Event::InitApply(object)) => {
                    listed = Some(object.data.unwrap_or_default());
                    continue;
                }
                Ok(Event::InitDone) => listed.take(),
                Ok(Event::Apply(object)) => Some(object.data.unwrap_or_default()),
                Ok(Event::Delete(_)) => None,
                Err(error) => {
                    tracing::warn!(config_map = pause::NAME, %error, "watch of the emergency stop failed, retrying");
                    if is_forbidden(&error) {
                        let known = cluster.read().pause;
                        cluster.update(|state| state.pause = Some(known.unwrap_or_default()));
                        tokio::time::sleep(FORBIDDEN_RETRY).await;
                    }
                    continue;
                }
            };
            log_level(data.as_ref().and_then(|data| data.get(pause::LOG_LEVEL_KEY)).map(String::as_str));
            let read = data.as_ref().map(Pause::of).unwrap_or_default();
            if cluster.read().pause != Some(read) {
                cluster.update(|state| state.pause = Some(read));
            }
        }
    });
}

fn is_forbidden(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    let (InitialListFailed(kube::Error::Api(status)) | WatchStartFailed(kube::Error::Api(status))) = error else {
        return false;
    };
    status.code == 403
}

/// Waits up to `limit` for the first read of the emergency stop, or until it may not be read. Returns `false` on timeout.
pub async fn pause_read(cluster: &Cluster, limit: Duration) -> bool {
    let mut changes = cluster.changes();
    let read = async {
        while cluster.read().pause.is_none() {
            if changes.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(limit, read).await.is_ok()
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;
    use crate::test_support::kubernetes::object_store::Refusal;
    use crate::test_support::kubernetes::{FakeApi, Fault};

    #[test]
    fn nothing_is_removed_while_an_object_is_left_out_whose_change_panicked() {
        let (cluster, now) = (Cluster::default(), UnixMillis(1));
        let mut table = Table { kind: "pods", cluster: &cluster, clock: || UnixMillis(1), left_out: BTreeSet::new() };
        let put = |table: &mut Table<'_>, name: &str, panics: bool| {
            let pod = objects::pod(name, &json!({}));
            table.change(&key(&pod), |state| {
                assert!(!panics, "a defect");
                state.apply_pod(&pod, now);
            });
        };
        let stale = || cluster.watch_signs().stale(&["pods"], now).is_some();
        cluster.watch_signs().record_list("pods", now);
        put(&mut table, "a", true);
        put(&mut table, "b", true);
        put(&mut table, "c", false);
        assert_eq!((cluster.read().pods.len(), stale()), (1, true));
        put(&mut table, "a", false);
        assert!(stale(), "another object is left out");
        table.retain(&["n/a".to_owned(), "n/c".to_owned()].into());
        assert_eq!((cluster.read().pods.len(), stale()), (2, false));
    }

    #[tokio::test]
    async fn the_emergency_stop_is_unknown_until_it_is_read_unless_nobody_may_read_it() {
        const LIMIT: Duration = Duration::from_millis(300);
        for (refusal, read, paused) in [
            (None, true, "disruption"),
            (Some(Refusal::gateway_timeout()), false, "none"),
            (Some(Refusal { code: 403, ..Refusal::invalid("no") }), true, "none"),
        ] {
            let api = FakeApi::default();
            let meta = json!({"name": pause::NAME, "namespace": "n"});
            let stop = json!({"metadata": meta, "data": {(pause::KEY): "disruption", (pause::LOG_LEVEL_KEY): "debug"}});
            api.put(&serde_json::from_value::<ConfigMap>(stop).unwrap());
            if let Some(refusal) = &refusal {
                api.inject(Fault::Refused(refusal.clone()), usize::MAX, |_| true);
            }
            let cluster = Arc::new(Cluster::default());
            let levels = Arc::new(Mutex::new(Vec::new()));
            let seen = Arc::clone(&levels);
            start_pause(&api.client(), &cluster, "n", move |level| seen.lock().unwrap().push(level.map(str::to_owned)));
            assert_eq!(pause_read(&cluster, LIMIT).await, read, "{refusal:?}");
            let wanted = refusal.is_none().then(|| Some("debug".to_owned()));
            assert_eq!(levels.lock().unwrap().first().cloned(), wanted, "{refusal:?}");
            assert_eq!(cluster.read().pause().label(), paused, "{refusal:?}");
        }
    }
}
