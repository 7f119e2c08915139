//! The metrics of single pods, made of the watched state at each scrape, in parts: neither the state nor memory is held for all of them.

use std::sync::Arc;

use axum::body::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::telemetry::metric::Metric;
use stowage_runtime::telemetry::registry;
use stowage_runtime::telemetry::series::{head, label, sample};

use crate::state::pods::Phase;
use crate::state::{Cluster, ClusterState, PodRecord};

/// Pods that have series; more would be too many for a scrape.
const MAX_PODS: usize = 200_000;
/// Pods that are read, and whose series are encoded, at a time.
const PART: usize = 500;

/// What the series of a pod name.
#[derive(Clone, Debug)]
struct PodSeries {
    namespace: String,
    name: String,
    owner: Option<Arc<str>>,
    node_name: Option<Arc<str>>,
    node: Option<Arc<Node>>,
    phase: Phase,
    is_ready: bool,
}

impl PodSeries {
    fn of(state: &ClusterState, pod: &PodRecord) -> Self {
        Self {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            owner: pod.owner.clone(),
            node_name: pod.node.clone(),
            node: pod.node.as_deref().and_then(|node| state.nodes.get(node)).cloned(),
            phase: pod.phase,
            is_ready: pod.is_ready(),
        }
    }

    fn labels(&self) -> String {
        let of_node = |key: &str| {
            let labels = self.node.as_ref().and_then(|node| node.metadata.labels.as_ref());
            labels.and_then(|labels| labels.get(key)).map_or("", String::as_str)
        };
        let pool = of_node(labels::NODE_POOL);
        let mut out = String::with_capacity(400);
        for (name, value) in [
            ("name", &*self.name),
            ("namespace", &*self.namespace),
            ("owner", self.owner.as_deref().unwrap_or_default()),
            ("node", self.node_name.as_deref().unwrap_or_default()),
            ("scheduled", bool_label(self.node_name.is_some())),
            ("nodepool", pool),
            ("zone", of_node(labels::ZONE)),
            ("arch", of_node(labels::ARCH)),
            ("capacity_type", of_node(labels::CAPACITY_TYPE)),
            ("instance_type", of_node(labels::INSTANCE_TYPE)),
            ("phase", self.phase.as_str()),
            ("ready", bool_label(self.is_ready)),
            ("managed", bool_label(!pool.is_empty())),
        ] {
            label(&mut out, name, value);
        }
        out
    }
}

fn bool_label(value: bool) -> &'static str {
    if value { "true" } else { "false" }
}

/// A pod that is not bound, or not ready yet, and since when it waits.
#[derive(Clone, Debug)]
struct Waiting {
    namespace: String,
    name: String,
    is_unbound: bool,
    is_unstarted: bool,
    created_at: UnixMillis,
    planned_at: Option<UnixMillis>,
    /// No plan has decided on it since then.
    undecided_since: Option<UnixMillis>,
}

impl Waiting {
    fn of(pod: &PodRecord) -> Option<Self> {
        let is_unbound = pod.node.is_none() && pod.active();
        let is_unstarted = pod.progress.is_starting;
        let is_undecided = is_unbound && pod.progress.decided_at.is_none();
        (is_unbound || is_unstarted).then(|| Self {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            is_unbound,
            is_unstarted,
            created_at: pod.created_at,
            planned_at: pod.progress.planned_at,
            undecided_since: pod.first_unschedulable.filter(|_| is_undecided && pod.unschedulable()),
        })
    }
}

/// A metric of waiting pods, and since when a pod waits, if it does.
type OfWaiting = (&'static Metric, fn(&Waiting) -> Option<UnixMillis>);

const OF_WAITING: [OfWaiting; 5] = [
    (registry::PODS_UNBOUND, |pod| pod.is_unbound.then_some(pod.created_at)),
    (registry::PODS_UNSTARTED, |pod| pod.is_unstarted.then_some(pod.created_at)),
    (registry::PODS_PLANNED_UNBOUND, |pod| pod.planned_at.filter(|_| pod.is_unbound)),
    (registry::PODS_PLANNED_UNSTARTED, |pod| pod.planned_at.filter(|_| pod.is_unstarted)),
    (registry::PODS_UNDECIDED, |pod| pod.undecided_since),
];

/// The series of all pods, as text in parts.
pub fn text(cluster: Arc<Cluster>) -> BoxStream<'static, Bytes> {
    let parts = async move {
        let keys: Vec<String> = cluster.read().pods.keys().take(MAX_PODS).cloned().collect();
        let keys: Arc<Vec<Vec<String>>> = Arc::new(keys.chunks(PART).map(<[String]>::to_vec).collect());
        let states = {
            let (cluster, keys) = (Arc::clone(&cluster), Arc::clone(&keys));
            (0..keys.len()).map(move |part| states_text(&cluster, &keys[part]))
        };
        let head = Bytes::from(head(registry::PODS_STATE));
        let waiting = stream::once(async move { waiting_text(waiting(&cluster, &keys).await) }).flatten();
        stream::iter(std::iter::once(head).chain(states)).chain(waiting)
    };
    stream::once(parts).flatten().boxed()
}

/// The states of these pods. The lock is not held while they are encoded.
fn states_text(cluster: &Cluster, keys: &[String]) -> Bytes {
    let pods: Vec<PodSeries> = {
        let state = cluster.read();
        keys.iter().filter_map(|key| Some(PodSeries::of(&state, state.pods.get(key)?))).collect()
    };
    let mut text = String::new();
    for pod in pods {
        sample(&mut text, registry::PODS_STATE, &pod.labels(), 1.0);
    }
    Bytes::from(text)
}

/// The pods that wait. Other tasks have their turn in between.
async fn waiting(cluster: &Cluster, keys: &[Vec<String>]) -> Vec<Waiting> {
    let mut out = Vec::new();
    for part in keys {
        {
            let state = cluster.read();
            out.extend(part.iter().filter_map(|key| Waiting::of(state.pods.get(key)?)));
        }
        tokio::task::yield_now().await;
    }
    out
}

/// Since when each of these pods waits, metric by metric.
fn waiting_text(pods: Vec<Waiting>) -> BoxStream<'static, Bytes> {
    let (pods, now) = (Arc::new(pods), clock::now());
    let families = OF_WAITING.iter().flat_map(move |(metric, since)| {
        let pods = Arc::clone(&pods);
        let parts = (0..pods.len()).step_by(PART).map(move |from| {
            let mut text = String::new();
            for pod in &pods[from..pods.len().min(from + PART)] {
                if let Some(since) = since(pod) {
                    let mut labels = String::new();
                    label(&mut labels, "name", &pod.name);
                    label(&mut labels, "namespace", &pod.namespace);
                    sample(&mut text, metric, &labels, now.saturating_since(since).as_secs_f64());
                }
            }
            Bytes::from(text)
        });
        std::iter::once(Bytes::from(head(metric))).chain(parts)
    });
    stream::iter(families).boxed()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;
    use crate::test_support::small_cluster::SmallCluster;

    async fn lines(state: ClusterState) -> Vec<String> {
        let parts: Vec<Bytes> = text(Arc::new(Cluster::new(state))).collect().await;
        String::from_utf8(parts.concat()).unwrap().lines().map(str::to_owned).collect()
    }

    #[tokio::test]
    async fn a_pod_has_karpenters_labels() {
        let mut cluster = SmallCluster::new(&[("p", json!({}))]);
        cluster.add_node("n1", "p", "small/spot");
        cluster.add_node_of_others("n2", "large");
        let owner =
            json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "uid": "r", "controller": true}]);
        let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        let owned = json!({"metadata": {"ownerReferences": owner}, "status": ready});
        cluster.add_pod("a", Some("n1"), "1", &owned);
        cluster.add_pod("b", Some("n2"), "1", &json!({"status": {"phase": "Failed"}}));
        cluster.add_pod("c", None, "1", &json!({}));
        let lines = lines(cluster.state).await;
        let of_a = "name=\"a\",namespace=\"n\",owner=\"/apis/apps/v1/namespaces/n/replicasets/web-1\",node=\"n1\",scheduled=\"true\",nodepool=\"p\",zone=\"z\",arch=\"amd64\",capacity_type=\"spot\",instance_type=\"small\",phase=\"Running\",ready=\"true\",managed=\"true\"";
        for labels in [
            of_a,
            "name=\"b\",namespace=\"n\",owner=\"/apis/apps/v1/namespaces/n/replicasets/r\",node=\"n2\",scheduled=\"true\",zone=\"z\",phase=\"Failed\",ready=\"false\",managed=\"false\"",
            "name=\"c\",namespace=\"n\",owner=\"/apis/apps/v1/namespaces/n/replicasets/r\",scheduled=\"false\",phase=\"Pending\",ready=\"false\",managed=\"false\"",
        ] {
            let line = format!("karpenter_pods_state{{{labels}}} 1");
            assert!(lines.contains(&line), "{line} in\n{}", lines.join("\n"));
        }
        assert_eq!(lines.iter().filter(|line| line.starts_with("karpenter_pods_state")).count(), 3);
    }

    #[tokio::test]
    async fn waiting_pods_show_since_when() {
        let mut state = ClusterState::default();
        let rejected = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
        for (name, phase, node, conditions) in [
            ("new", "Pending", None, json!([])),
            ("rejected", "Pending", None, rejected.clone()),
            ("planned", "Pending", None, rejected),
            ("pulling", "Pending", Some("n1"), json!([])),
            ("runs", "Running", Some("n1"), json!([])),
        ] {
            let patch = json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"nodeName": node}, "status": {"phase": phase, "conditions": conditions}});
            state.apply_pod(&objects::pod(name, &patch), UnixMillis(1));
        }
        state.record_decided(["n/planned"], UnixMillis(2));
        state.record_planned([&"n/planned".to_owned()], UnixMillis(3));
        let lines = lines(state).await;
        let of = |metric: &str| {
            let series = lines
                .iter()
                .filter_map(|line| line.strip_prefix(&format!("karpenter_pods_{metric}_time_seconds{{name=\"")));
            let mut names: Vec<&str> = series.filter_map(|rest| rest.strip_suffix(rest.split_once('"')?.1)).collect();
            names.sort_unstable();
            names.join(" ").replace('"', "")
        };
        assert_eq!(of("unbound"), "new planned rejected");
        assert_eq!(of("unstarted"), "new planned pulling rejected");
        assert_eq!(of("provisioning_unbound"), "planned");
        assert_eq!(of("provisioning_unstarted"), "planned");
        assert_eq!(of("provisioning_scheduling_undecided"), "rejected");
        let year = 365.0 * 86_400.0;
        let value = |line: &String| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
        let unbound = lines.iter().find(|line| line.starts_with("karpenter_pods_unbound_time_seconds{")).unwrap();
        assert!((0.5 * year..50.0 * year).contains(&value(unbound)), "{unbound}");
    }

    #[tokio::test]
    async fn the_series_of_a_metric_follow_each_other_whatever_the_number_of_pods() {
        let mut state = ClusterState::default();
        for at in 0..=2 * PART {
            state.apply_pod(&objects::pod(&format!("p{at}"), &json!({})), UnixMillis(1));
        }
        let lines = lines(state).await;
        let mut metrics: Vec<&str> =
            lines.iter().filter_map(|line| line.split('{').next()).filter(|name| !name.starts_with('#')).collect();
        assert_eq!(metrics.len(), 3 * (2 * PART + 1), "state, unbound and unstarted");
        metrics.dedup();
        assert_eq!(metrics.len(), 3, "{metrics:?}");
        assert_eq!(lines.iter().filter(|line| line.starts_with("# TYPE ")).count(), 1 + OF_WAITING.len());
    }
}
