//! The metrics of single nodes, made of the watched state at each scrape, in parts: neither the state nor memory is held for all of them.

use std::sync::{Arc, LazyLock};

use axum::body::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_model::labels;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::telemetry::metric::Metric;
use stowage_runtime::telemetry::registry;
use stowage_runtime::telemetry::series::{head, label, sample};

use crate::decisions::gauges::{in_units, resource_type};
use crate::decisions::node_usage::NodeUsage;
use crate::state::Cluster;
use crate::state::object_ext::ObjectExt;

/// Nodes that have series; more would be too many for a scrape.
const MAX_NODES: usize = 20_000;
/// Nodes that are read, and whose series are encoded, at a time.
const PART: usize = 100;

/// CPU, memory, ephemeral storage and pods: the first of [`Resources::iter`].
const COMMON: usize = 4;

/// A metric by resource, and where a node has it.
type OfResources = (&'static Metric, fn(&NodeUsage) -> &Resources);

const BY_RESOURCE: [OfResources; 6] = [
    (registry::NODES_ALLOCATABLE, |node| &node.allocatable),
    (registry::NODES_POD_REQUESTS, |node| &node.requests),
    (registry::NODES_POD_LIMITS, |node| &node.limits),
    (registry::NODES_DAEMON_REQUESTS, |node| &node.daemon_requests),
    (registry::NODES_DAEMON_LIMITS, |node| &node.daemon_limits),
    (registry::NODES_OVERHEAD, |node| &node.overhead),
];

/// Well-known labels, and their names in metrics: without the domain, in snake case.
static WELL_KNOWN: LazyLock<Vec<(&'static str, String)>> = LazyLock::new(|| {
    let name = |key: &str| key.rsplit('/').next().unwrap_or(key).to_lowercase().replace('-', "_");
    labels::well_known().map(|key| (key, name(key))).collect()
});

/// The series of all nodes, as text in parts.
pub fn text(cluster: Arc<Cluster>) -> BoxStream<'static, Bytes> {
    let parts = async move {
        let nodes: Arc<Vec<(NodeUsage, String)>> = Arc::new(read(&cluster).await);
        let now = clock::now();
        let families = BY_RESOURCE.iter().map(Some).chain([None]);
        stream::iter(families).flat_map(move |family| family_text(family, Arc::clone(&nodes), now))
    };
    stream::once(parts).flatten().boxed()
}

/// What nodes have and their pods use, with the labels of their series but for the resource. Other tasks have their turn in between.
async fn read(cluster: &Cluster) -> Vec<(NodeUsage, String)> {
    let nodes: Vec<Arc<Node>> = cluster.read().nodes.values().take(MAX_NODES).cloned().collect();
    let mut out = Vec::with_capacity(nodes.len());
    for part in nodes.chunks(PART) {
        let part: Vec<NodeUsage> = {
            let state = cluster.read();
            part.iter().map(|node| NodeUsage::of(&state, node)).collect()
        };
        out.extend(part.into_iter().map(|node| {
            let labels = labels_of(&node);
            (node, labels)
        }));
        tokio::task::yield_now().await;
    }
    out
}

/// The series of a metric by resource, or of the ages of the nodes.
fn family_text(
    family: Option<&'static OfResources>,
    nodes: Arc<Vec<(NodeUsage, String)>>,
    now: UnixMillis,
) -> BoxStream<'static, Bytes> {
    let metric = family.map_or(registry::NODES_LIFETIME, |(metric, _)| metric);
    let parts = (0..nodes.len()).step_by(PART).map(move |from| {
        let mut text = String::new();
        for (node, labels) in &nodes[from..nodes.len().min(from + PART)] {
            if let Some((metric, of)) = family {
                of_resources(&mut text, metric, labels, node, of(node));
            } else {
                let age = now.saturating_since(node.node.created_at());
                sample(&mut text, metric, labels, age.as_secs_f64());
            }
        }
        Bytes::from(text)
    });
    stream::iter(std::iter::once(Bytes::from(head(metric))).chain(parts)).boxed()
}

fn labels_of(usage: &NodeUsage) -> String {
    let mut out = String::new();
    label(&mut out, "node_name", &usage.node.name_any());
    label(&mut out, "managed", if usage.is_managed { "true" } else { "false" });
    let phase = usage.node.status.as_ref().and_then(|status| status.phase.as_deref());
    label(&mut out, "phase", phase.unwrap_or_default());
    for (key, name) in WELL_KNOWN.iter() {
        label(&mut out, name, usage.node.labels().get(*key).map_or("", String::as_str));
    }
    out
}

fn of_resources(text: &mut String, metric: &Metric, labels: &str, usage: &NodeUsage, amounts: &Resources) {
    let common = amounts.iter().take(COMMON).filter(|(name, amount)| *amount != 0 || *name != "ephemeral-storage");
    // A pod may name any extended resource, and what it names would be a label: only those of the node count.
    let has = |name: &str| usage.allocatable.get(name) != 0 || usage.overhead.get(name) != 0;
    let extended = amounts.iter().skip(COMMON).filter(|(name, _)| has(name));
    for (resource, amount) in common.chain(extended) {
        let mut labels = labels.to_owned();
        label(&mut labels, "resource_type", &resource_type(resource));
        sample(text, metric, &labels, in_units(resource, amount));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;
    use crate::state::ClusterState;
    use crate::test_support::small_cluster::SmallCluster;

    async fn lines(state: ClusterState) -> Vec<String> {
        let parts: Vec<Bytes> = text(Arc::new(Cluster::new(state))).collect().await;
        String::from_utf8(parts.concat()).unwrap().lines().map(str::to_owned).collect()
    }

    #[tokio::test]
    async fn a_node_has_karpenters_series_and_labels() {
        let mut cluster = SmallCluster::new(&[("p", json!({}))]);
        cluster.add_node("n1", "p", "small/spot");
        cluster.add_node_of_others("n2", "large");
        let limits = json!([{"name": "c", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1500m", "memory": "1Gi"}}}]);
        cluster.add_pod("a", Some("n1"), "1", &json!({"spec": {"containers": limits}}));
        cluster.add_pod("done", Some("n1"), "1", &json!({"status": {"phase": "Succeeded"}}));
        let daemon =
            json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]);
        cluster.add_pod("d", Some("n1"), "250m", &json!({"metadata": {"ownerReferences": daemon}}));
        let lines = lines(cluster.state).await;
        let of_n1 = "node_name=\"n1\",managed=\"true\",nodepool=\"p\",zone=\"z\",instance_type=\"small\",arch=\"amd64\",os=\"linux\",capacity_type=\"spot\"";
        for (metric, resource, value) in [
            ("nodes_allocatable", "cpu", "2"),
            ("nodes_allocatable", "memory", "8589934592"),
            ("nodes_allocatable", "pods", "110"),
            ("nodes_total_pod_requests", "cpu", "1.25"),
            ("nodes_total_pod_requests", "pods", "2"),
            ("nodes_total_pod_limits", "cpu", "1.5"),
            ("nodes_total_pod_limits", "memory", "1073741824"),
            ("nodes_total_daemon_requests", "cpu", "0.25"),
            ("nodes_total_daemon_limits", "pods", "1"),
            ("nodes_system_overhead", "cpu", "0"),
        ] {
            let line = format!("karpenter_{metric}{{{of_n1},resource_type=\"{resource}\"}} {value}");
            assert!(lines.contains(&line), "{line} in\n{}", lines.join("\n"));
        }
        let of_n2 =
            "karpenter_nodes_allocatable{node_name=\"n2\",managed=\"false\",zone=\"z\",resource_type=\"cpu\"} 8";
        assert!(lines.iter().any(|line| line == of_n2), "{}", lines.join("\n"));
        assert_eq!(
            lines.iter().filter(|line| line.starts_with("karpenter_nodes_current_lifetime_seconds{")).count(),
            2
        );
    }

    #[tokio::test]
    async fn resources_that_only_pods_name_are_no_series() {
        let mut cluster = SmallCluster::new(&[("p", json!({}))]);
        cluster.add_node("n1", "p", "small/spot");
        let size = json!({"cpu": "2", "memory": "8Gi", "pods": "110", "example.com/fpga": "2"});
        let mut node = (*cluster.state.nodes["n1"]).clone();
        node.status = serde_json::from_value(json!({"allocatable": size, "capacity": size})).unwrap();
        cluster.state.apply_node(node);
        let requests = json!({"cpu": "1", "example.com/fpga": "1", "tenant.example.com/a-label": "7"});
        let containers = json!([{"name": "c", "resources": {"requests": requests, "limits": requests}}]);
        cluster.add_pod("a", Some("n1"), "1", &json!({"spec": {"containers": containers}}));
        let lines = lines(cluster.state).await;
        let of = |resource: &str| {
            lines.iter().filter(|line| line.contains(&format!("resource_type=\"{resource}\""))).count()
        };
        // Not of DaemonSets, and nothing is kept from pods.
        assert_eq!((of("example.com/fpga"), of("tenant.example.com/a_label")), (3, 0), "{lines:?}");
    }

    #[tokio::test]
    async fn the_series_of_a_metric_follow_each_other_whatever_the_number_of_nodes() {
        let mut state = ClusterState::default();
        let size = json!({"cpu": "2", "memory": "8Gi", "pods": "110"});
        for at in 0..=2 * PART {
            state.apply_node(objects::node(
                &format!("n{at}"),
                &json!({"status": {"allocatable": size, "capacity": size}}),
            ));
        }
        let lines = lines(state).await;
        let mut metrics: Vec<&str> =
            lines.iter().filter_map(|line| line.split('{').next()).filter(|name| !name.starts_with('#')).collect();
        assert_eq!(metrics.iter().filter(|name| **name == "karpenter_nodes_allocatable").count(), 3 * (2 * PART + 1));
        metrics.dedup();
        assert_eq!(metrics.len(), BY_RESOURCE.len() + 1, "{metrics:?}");
        assert_eq!(lines.iter().filter(|line| line.starts_with("# TYPE ")).count(), metrics.len());
    }
}
