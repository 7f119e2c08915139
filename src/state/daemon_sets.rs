//! DaemonSets as overhead of nodes. What their pods request is what the API server makes of the template (a LimitRange gives defaults), or
//! what it made of their newest pod (a webhook, or a resize): the larger of both counts.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetSpec};
use k8s_openapi::api::core::v1::LimitRange;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use stowage_model::limit_range::DefaultRequests;
use stowage_model::pod_class::PodClass;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_planner::{Daemon, Interner, PodEntry};

/// A DaemonSet, which counts as overhead of nodes.
#[derive(Clone, Debug)]
pub struct DaemonRecord {
    /// UID of the DaemonSet, which owns its pods.
    pub uid: Arc<str>,
    /// The DaemonSet's pods as the planner sees them.
    pub daemon: Daemon,
    /// The DaemonSet, reduced to its identity and template.
    set: Arc<DaemonSet>,
    /// The class of the template.
    template: Arc<PodClass>,
    /// The newest of its pods since the template changed.
    newest: Option<NewestPod>,
}

#[derive(Clone, Debug)]
struct NewestPod {
    created: (UnixMillis, Arc<str>),
    requests: Resources,
}

impl DaemonRecord {
    /// Whether the pod is one of its pods. A UID may be copied to another namespace.
    fn owns(&self, pod: &PodEntry) -> bool {
        pod.owner.as_ref() == Some(&self.uid) && pod.class.namespace == self.template.namespace
    }

    /// Considers one of its pods. Returns whether what its pods request is another now.
    fn observe(&mut self, pod: &PodEntry) -> bool {
        let created = (pod.created_at, Arc::clone(&pod.key));
        if self.newest.as_ref().is_some_and(|newest| newest.created > created) {
            return false;
        }
        self.newest = Some(NewestPod { created, requests: pod.class.requests.clone() });
        self.update()
    }

    fn update(&mut self) -> bool {
        let mut class = Arc::clone(&self.template);
        if let Some(newest) = &self.newest {
            let mut requests = class.requests.clone();
            requests.raise_to(&newest.requests);
            if requests != class.requests {
                Arc::make_mut(&mut class).requests = requests;
            }
        }
        let changed = self.daemon.class != class;
        if changed {
            self.daemon.class = class;
        }
        changed
    }
}

/// What of a DaemonSet decides its pods.
fn reduced(set: &DaemonSet) -> DaemonSet {
    let ObjectMeta { name, namespace, uid, .. } = set.metadata.clone();
    let template = set.spec.as_ref().map(|spec| spec.template.clone());
    let spec = template.map(|template| DaemonSetSpec { template, ..DaemonSetSpec::default() });
    DaemonSet { metadata: ObjectMeta { name, namespace, uid, ..ObjectMeta::default() }, spec, status: None }
}

/// DaemonSets by `namespace/name`, and what completes their templates. Invalid DaemonSets are left out.
#[derive(Debug, Default)]
pub struct DaemonSets {
    records: BTreeMap<String, DaemonRecord>,
    /// Default requests by LimitRange, `namespace/name`.
    limit_ranges: BTreeMap<String, DefaultRequests>,
    /// Changes of the records so far.
    revision: u64,
}

impl Deref for DaemonSets {
    type Target = BTreeMap<String, DaemonRecord>;

    fn deref(&self) -> &Self::Target {
        &self.records
    }
}

impl DaemonSets {
    /// Changes of the DaemonSets so far, and of what their pods request.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Applies a DaemonSet. Its status, which changes with each of its pods, does not count as a change. `pods_of` returns the pods whose controller has a
    /// UID.
    pub fn apply<'p, P: Iterator<Item = &'p PodEntry>>(
        &mut self,
        interner: &mut Interner,
        set: &DaemonSet,
        pods_of: impl FnOnce(&str) -> P,
    ) {
        let key = format!("{}/{}", set.namespace().unwrap_or_default(), set.name_any());
        let set = reduced(set);
        if self.records.get(&key).is_some_and(|known| *known.set == set) {
            return;
        }
        // The pods of an earlier template say nothing about this one, but after a start it is not known which they are of.
        let is_first = !self.records.contains_key(&key);
        self.read(interner, &key, Arc::new(set));
        if let Some(record) = self.records.get_mut(&key).filter(|_| is_first) {
            let uid = Arc::clone(&record.uid);
            let newest = pods_of(&uid).filter(|pod| record.owns(pod)).max_by_key(|pod| (pod.created_at, &pod.key));
            if let Some(newest) = newest {
                record.observe(newest);
            }
        }
    }

    /// Parses a DaemonSet with the defaults of its namespace.
    fn read(&mut self, interner: &mut Interner, key: &str, set: Arc<DaemonSet>) {
        let defaults = self.default_requests(set.metadata.namespace.as_deref().unwrap_or_default());
        let mut completed = DaemonSet::clone(&set);
        if let Some(spec) = completed.spec.as_mut().and_then(|spec| spec.template.spec.as_mut()) {
            defaults.apply_to(spec);
        }
        let daemon = match interner.intern_daemon(&completed) {
            Ok(daemon) => daemon,
            Err(error) => {
                tracing::warn!(daemon_set = key, %error, "invalid daemon set not counted as overhead");
                self.delete(key);
                return;
            }
        };
        let uid: Arc<str> = Arc::from(set.metadata.uid.as_deref().unwrap_or_default());
        let known = self.records.get(key).filter(|known| known.uid == uid);
        let newest = known.filter(|known| known.set.spec == set.spec).and_then(|known| known.newest.clone());
        let before = known.map(|known| Arc::clone(&known.daemon.class));
        let template = Arc::clone(&daemon.class);
        let mut record = DaemonRecord { uid, daemon, set, template, newest };
        record.update();
        self.revision += u64::from(before.as_ref() != Some(&record.daemon.class));
        self.records.insert(key.to_owned(), record);
    }

    /// Removes the DaemonSet `namespace/name`.
    pub fn delete(&mut self, key: &str) {
        self.revision += u64::from(self.records.remove(key).is_some());
    }

    /// Considers a pod of a DaemonSet that is new, or whose requests changed.
    pub fn observe(&mut self, pod: &PodEntry) {
        if let Some(record) = self.records.values_mut().find(|record| record.owns(pod)) {
            self.revision += u64::from(record.observe(pod));
        }
    }

    /// Applies a LimitRange.
    pub fn apply_limit_range(&mut self, interner: &mut Interner, limit_range: &LimitRange) {
        let namespace = limit_range.namespace().unwrap_or_default();
        let key = format!("{namespace}/{}", limit_range.name_any());
        let defaults = DefaultRequests::of(limit_range);
        if self.limit_ranges.get(&key) != Some(&defaults) {
            self.limit_ranges.insert(key, defaults);
            self.read_all_of(interner, &namespace);
        }
    }

    /// Removes the LimitRange `namespace/name`.
    pub fn delete_limit_range(&mut self, interner: &mut Interner, key: &str) {
        if self.limit_ranges.remove(key).is_some() {
            self.read_all_of(interner, key.split_once('/').map_or("", |(namespace, _)| namespace));
        }
    }

    /// Keys of the LimitRanges.
    pub fn limit_range_keys(&self) -> BTreeSet<String> {
        self.limit_ranges.keys().cloned().collect()
    }

    fn read_all_of(&mut self, interner: &mut Interner, namespace: &str) {
        let own = |record: &&DaemonRecord| record.set.metadata.namespace.as_deref().unwrap_or_default() == namespace;
        let records = self.records.iter().filter(|(_, record)| own(record));
        let sets: Vec<_> = records.map(|(key, record)| (key.clone(), Arc::clone(&record.set))).collect();
        for (key, set) in sets {
            self.read(interner, &key, set);
        }
    }

    /// The default requests of a namespace.
    fn default_requests(&self, namespace: &str) -> DefaultRequests {
        let mut out = DefaultRequests::default();
        let prefix = format!("{namespace}/");
        let from = self.limit_ranges.range(prefix.clone()..).take_while(|(key, _)| key.starts_with(&prefix));
        from.for_each(|(_, defaults)| out.raise_to(defaults));
        out
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;
    use crate::state::tables::ClusterState;

    fn set(requests: &Value) -> DaemonSet {
        let container = json!({"name": "c", "resources": {"requests": requests}});
        let spec = json!({"selector": {}, "template": {"spec": {"containers": [container]}}});
        serde_json::from_value(json!({"metadata": {"name": "d", "namespace": "n", "uid": "set"}, "spec": spec}))
            .unwrap()
    }

    fn limit_range(name: &str, cpu: &str) -> LimitRange {
        let limits = json!([{"type": "Container", "defaultRequest": {"cpu": cpu}}]);
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "n"}, "spec": {"limits": limits}}))
            .unwrap()
    }

    fn put_pod(state: &mut ClusterState, name: &str, second: u8, cpu: &str, patch: &Value) {
        let owners =
            json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "set", "controller": true}]);
        let created = format!("2026-01-01T00:00:{second:02}Z");
        let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
        let mut whole = json!({"metadata": {"ownerReferences": owners, "creationTimestamp": created},
            "spec": {"nodeName": "x", "containers": [container]}});
        json_patch::merge(&mut whole, patch);
        state.apply_pod(&objects::pod(name, &whole), UnixMillis(1));
    }

    /// Millicores that one of its pods counts for, and whether the nodes are evaluated again.
    fn counted(state: &mut ClusterState, change: impl FnOnce(&mut ClusterState)) -> (i64, bool) {
        let before = state.daemons.revision();
        change(state);
        (state.daemons["n/d"].daemon.class.requests.cpu.0, state.daemons.revision() != before)
    }

    #[test]
    fn the_defaults_of_the_namespace_complete_the_template() {
        let mut state = ClusterState::default();
        state.apply_limit_range(&limit_range("early", "100m"));
        assert_eq!(counted(&mut state, |state| state.apply_daemon_set(&set(&json!({})))), (100, true));
        assert_eq!(counted(&mut state, |state| state.apply_limit_range(&limit_range("late", "1"))), (1_000, true));
        assert_eq!(counted(&mut state, |state| state.apply_limit_range(&limit_range("late", "1"))), (1_000, false));
        assert_eq!(counted(&mut state, |state| state.delete_limit_range("n/late")), (100, true));
        assert_eq!(counted(&mut state, |state| state.delete_limit_range("n/early")), (0, true));
        let of_another: LimitRange = {
            let mut range = limit_range("r", "3");
            range.metadata.namespace = Some("n2".into());
            range
        };
        assert_eq!(counted(&mut state, |state| state.apply_limit_range(&of_another)), (0, false));
    }

    #[test]
    fn the_larger_of_the_template_and_the_newest_pod_counts() {
        let mut state = ClusterState::default();
        put_pod(&mut state, "before", 1, "300m", &json!({}));
        assert_eq!(counted(&mut state, |state| state.apply_daemon_set(&set(&json!({"cpu": "200m"})))), (300, true));
        let newer =
            |cpu: &'static str, second| move |state: &mut ClusterState| put_pod(state, "a", second, cpu, &json!({}));
        assert_eq!(counted(&mut state, newer("500m", 2)), (500, true), "a webhook enlarged it");
        assert_eq!(counted(&mut state, newer("500m", 2)), (500, false));
        assert_eq!(
            counted(&mut state, |state| put_pod(state, "old", 0, "4", &json!({}))),
            (500, false),
            "an older pod"
        );
        assert_eq!(counted(&mut state, |state| state.delete_pod("n/a", UnixMillis(2))), (500, false));
        assert_eq!(
            counted(&mut state, |state| put_pod(state, "b", 3, "100m", &json!({}))),
            (200, true),
            "the template"
        );
        let elsewhere = json!({"metadata": {"namespace": "n2"}});
        assert_eq!(counted(&mut state, |state| put_pod(state, "c", 4, "8", &elsewhere)), (200, false), "a copied UID");
        let done = json!({"status": {"phase": "Failed"}});
        assert_eq!(counted(&mut state, |state| put_pod(state, "c", 5, "8", &done)), (200, false));
    }

    #[test]
    fn pods_of_an_earlier_template_do_not_count() {
        let mut state = ClusterState::default();
        state.apply_daemon_set(&set(&json!({"cpu": "1"})));
        put_pod(&mut state, "a", 1, "2", &json!({}));
        assert_eq!(counted(&mut state, |state| state.apply_daemon_set(&set(&json!({"cpu": "500m"})))), (500, true));
        assert_eq!(counted(&mut state, |state| put_pod(state, "b", 2, "600m", &json!({}))), (600, true));
        assert_eq!(counted(&mut state, |state| state.apply_limit_range(&limit_range("r", "3"))), (600, false));
    }
}
