//! Metrics of the conditions of NodeClaims, NodePools, Nodes and EC2NodeClasses: their transitions, and at each scrape what they are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::telemetry::condition_series::ConditionMetrics;
use stowage_runtime::telemetry::metric::Metric;
use stowage_runtime::telemetry::registry;
use stowage_runtime::telemetry::series::{head, label, sample};

use crate::controllers::context::Context;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::condition_transitions::{Change, ConditionView, Conditioned, Followed, Transition, transitions};
use crate::state::{Cluster, ClusterState};

/// Transitions that follow each other faster are one.
const PACE: Pace = Pace { debounce: Duration::from_secs(1), resync: Duration::from_secs(10) };
/// Objects of a kind that have series; more would be too many for a scrape.
const MAX_OBJECTS: usize = 20_000;
/// Series of a kind by type, status, reason and labels of the object: a kubelet may write any of them.
const MAX_COUNTED: usize = 10_000;
/// Objects whose series are encoded at a time.
const PART: usize = 100;

/// The objects that are followed.
#[derive(Debug, Default)]
pub struct Objects {
    claims: Followed<NodeClaim>,
    pools: Followed<NodePool>,
    nodes: Followed<Node>,
    classes: Followed<Ec2NodeClass>,
    counted: [Counted; 4],
}

/// Type, status and reason of the conditions that are counted, with the labels of their objects.
#[derive(Debug, Default)]
struct Counted(BTreeSet<Vec<String>>);

impl Counted {
    /// Whether a condition of an object is counted: the first ones are.
    fn admit<T: Conditioned>(&mut self, condition: &ConditionView<'_>, meta: &ObjectMeta) -> bool {
        let own = [condition.kind, condition.status, condition.reason];
        let key = values::<T>(&own, meta).into_iter().map(str::to_owned).collect();
        self.0.contains(&key) || (self.0.len() < MAX_COUNTED && self.0.insert(key))
    }
}

/// What changed.
#[derive(Debug)]
pub struct Changes {
    claims: Vec<Change<NodeClaim>>,
    pools: Vec<Change<NodePool>>,
    nodes: Vec<Change<Node>>,
    classes: Vec<Change<Ec2NodeClass>>,
}

impl Changes {
    /// Number of the changes.
    pub fn count(&self) -> usize {
        self.claims.len() + self.pools.len() + self.nodes.len() + self.classes.len()
    }
}

impl Objects {
    /// What changed since the last call.
    pub fn changes(&mut self, state: &ClusterState) -> Changes {
        Changes {
            claims: self.claims.changes(&state.claims),
            pools: self.pools.changes(&state.pools),
            nodes: self.nodes.changes(&state.nodes),
            classes: self.classes.changes(&state.classes),
        }
    }
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let (mut run_loop, mut objects) = (RunLoop::new(&ctx.cluster, PACE), Objects::default());
    loop {
        pass(&ctx, &mut objects, clock::now());
        run_loop.next().await;
    }
}

fn pass(ctx: &Context, objects: &mut Objects, now: UnixMillis) {
    let changes = objects.changes(&ctx.cluster.read());
    let [claims, pools, nodes, classes] = &mut objects.counted;
    count(&ctx.metrics.claim_conditions, claims, &changes.claims, now);
    count(&ctx.metrics.pool_conditions, pools, &changes.pools, now);
    count(&ctx.metrics.node_conditions, nodes, &changes.nodes, now);
    count(&ctx.metrics.class_conditions, classes, &changes.classes, now);
}

/// Counts the transitions and ends of objects.
fn count<T: Conditioned>(metrics: &ConditionMetrics, counted: &mut Counted, changes: &[Change<T>], now: UnixMillis) {
    for Change { old, new } in changes {
        match (old, new) {
            (old, Some(new)) => {
                for Transition { from, to } in transitions(old.as_deref(), &**new) {
                    if !counted.admit::<T>(&to, new.meta()) {
                        continue;
                    }
                    let own = [to.kind, to.status, to.reason];
                    metrics.transitions.with_label_values(&values::<T>(&own, new.meta())).inc();
                    if let Some(from) = from.filter(|from| counted.admit::<T>(from, new.meta())) {
                        let own = [from.kind, from.status];
                        let seconds = to.since.saturating_since(from.since).as_secs_f64();
                        metrics.transition_seconds.with_label_values(&values::<T>(&own, new.meta())).observe(seconds);
                    }
                }
            }
            (Some(old), None) => {
                if let Some(begin) = &old.meta().deletion_timestamp {
                    let seconds = now.saturating_since(UnixMillis::from(begin)).as_secs_f64();
                    metrics.termination_seconds.with_label_values(&values::<T>(&[], old.meta())).observe(seconds);
                }
            }
            (None, None) => {}
        }
    }
}

/// Values of labels: these, and those of the labels of the object.
fn values<'o, T: Conditioned>(own: &[&'o str], meta: &'o ObjectMeta) -> Vec<&'o str> {
    own.iter().copied().chain(T::LABELS.iter().map(|key| value(meta, key))).collect()
}

fn value<'o>(meta: &'o ObjectMeta, key: &str) -> &'o str {
    meta.labels.as_ref().and_then(|labels| labels.get(key)).map_or("", String::as_str)
}

/// The gauges of the conditions of a kind.
#[derive(Clone, Copy, Debug)]
struct Gauges {
    /// 1 for each condition.
    count: &'static Metric,
    /// Seconds since its last transition.
    seconds: &'static Metric,
    /// Seconds since the object was deleted.
    terminating: &'static Metric,
}

/// The series of all objects with conditions, as text in parts.
pub fn text(cluster: &Cluster) -> BoxStream<'static, Bytes> {
    let (claims, pools, nodes, classes) = {
        let state = cluster.read();
        (first(&state.claims), first(&state.pools), first(&state.nodes), first(&state.classes))
    };
    let now = clock::now();
    let claims = text_of(claims, CLAIMS, now);
    let pools = text_of(pools, POOLS, now);
    let nodes = text_of(nodes, NODES, now);
    claims.chain(pools).chain(nodes).chain(text_of(classes, CLASSES, now)).boxed()
}

const CLAIMS: Gauges = Gauges {
    count: registry::CLAIM_CONDITION_COUNT,
    seconds: registry::CLAIM_CONDITION_SECONDS,
    terminating: registry::CLAIM_TERMINATING_SECONDS,
};
const POOLS: Gauges = Gauges {
    count: registry::POOL_CONDITION_COUNT,
    seconds: registry::POOL_CONDITION_SECONDS,
    terminating: registry::POOL_TERMINATING_SECONDS,
};
const NODES: Gauges = Gauges {
    count: registry::NODE_CONDITION_COUNT,
    seconds: registry::NODE_CONDITION_SECONDS,
    terminating: registry::NODE_TERMINATING_SECONDS,
};
const CLASSES: Gauges = Gauges {
    count: registry::CLASS_CONDITION_COUNT,
    seconds: registry::CLASS_CONDITION_SECONDS,
    terminating: registry::CLASS_TERMINATING_SECONDS,
};

fn first<T>(objects: &BTreeMap<String, Arc<T>>) -> Arc<Vec<Arc<T>>> {
    Arc::new(objects.values().take(MAX_OBJECTS).cloned().collect())
}

/// The series of the objects of a kind, metric by metric.
fn text_of<T: Conditioned + Send + Sync + 'static>(
    objects: Arc<Vec<Arc<T>>>,
    gauges: Gauges,
    now: UnixMillis,
) -> impl Stream<Item = Bytes> + Send + 'static {
    let families: [(&'static Metric, Write<T>); 3] = [
        (gauges.count, |text, metric, object, _| {
            of_conditions(text, metric, object, |_| 1.0);
        }),
        (gauges.seconds, |text, metric, object, now| {
            of_conditions(text, metric, object, |condition| now.saturating_since(condition.since).as_secs_f64());
        }),
        (gauges.terminating, |text, metric, object, now| {
            if let Some(begin) = &object.meta().deletion_timestamp {
                let seconds = now.saturating_since(UnixMillis::from(begin)).as_secs_f64();
                sample(text, metric, &with_object_labels::<T>(named(object.meta()), object.meta()), seconds);
            }
        }),
    ];
    let parts = families.into_iter().flat_map(move |(metric, write)| {
        let objects = Arc::clone(&objects);
        let parts = (0..objects.len()).step_by(PART).map(move |from| {
            let mut text = String::new();
            for object in &objects[from..objects.len().min(from + PART)] {
                write(&mut text, metric, object, now);
            }
            Bytes::from(text)
        });
        std::iter::once(Bytes::from(head(metric))).chain(parts)
    });
    stream::iter(parts)
}

/// Writes the samples of an object.
type Write<T> = fn(&mut String, &'static Metric, &T, UnixMillis);

/// A sample for each condition of an object.
fn of_conditions<T: Conditioned>(
    text: &mut String,
    metric: &Metric,
    object: &T,
    value: impl Fn(&ConditionView<'_>) -> f64,
) {
    let meta = object.meta();
    let own = named(meta);
    for condition in object.conditions() {
        let mut labels = own.clone();
        label(&mut labels, "type", condition.kind);
        label(&mut labels, "status", condition.status);
        label(&mut labels, "reason", condition.reason);
        sample(text, metric, &with_object_labels::<T>(labels, meta), value(&condition));
    }
}

fn named(meta: &ObjectMeta) -> String {
    let mut labels = String::new();
    label(&mut labels, "name", meta.name.as_deref().unwrap_or_default());
    labels
}

/// Adds the labels of the object.
fn with_object_labels<T: Conditioned>(mut labels: String, meta: &ObjectMeta) -> String {
    for key in T::LABELS {
        label(&mut labels, &in_metrics(key), value(meta, key));
    }
    labels
}

/// The name of a label of an object in the metrics of conditions.
fn in_metrics(key: &str) -> String {
    key.replace(['/', '.', '-'], "_")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_runtime::telemetry::Metrics;
    use stowage_runtime::telemetry::controllers::ControllerMetrics;
    use stowage_test_objects as objects;

    use super::*;

    async fn lines(state: ClusterState) -> Vec<String> {
        let parts: Vec<Bytes> = text(&Cluster::new(state)).collect().await;
        String::from_utf8(parts.concat()).unwrap().lines().map(str::to_owned).collect()
    }

    fn condition(kind: &str, status: &str, reason: &str, at: &str) -> Value {
        json!({"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": at})
    }

    fn claim(conditions: &[Value], deleted_at: Option<&str>) -> NodeClaim {
        let own = json!({(labels::NODE_POOL): "p", (labels::EC2_NODE_CLASS): "default"});
        let finalizers = [labels::TERMINATION_FINALIZER];
        let meta = json!({"labels": own, "deletionTimestamp": deleted_at, "finalizers": finalizers});
        objects::claim("c", &json!({"metadata": meta, "status": {"conditions": conditions}}))
    }

    #[test]
    fn labels_of_objects_are_named_as_in_karpenter_and_declared() {
        for (declared, keys) in [
            (registry::CLAIM_TRANSITIONS, NodeClaim::LABELS),
            (registry::NODE_TRANSITIONS, Node::LABELS),
            (registry::POOL_TRANSITIONS, NodePool::LABELS),
            (registry::CLASS_TRANSITIONS, Ec2NodeClass::LABELS),
        ] {
            let names: Vec<String> = keys.iter().map(|key| in_metrics(key)).collect();
            let declared: Vec<&str> = declared.labels.iter().map(|(name, _)| *name).skip(3).collect();
            assert_eq!(names, declared);
        }
        assert_eq!(in_metrics(labels::EC2_NODE_CLASS), "karpenter_k8s_aws_ec2nodeclass");
    }

    #[tokio::test]
    async fn each_condition_of_an_object_has_two_series() {
        let mut state = ClusterState::default();
        let at = "2026-01-01T00:00:00Z";
        let conditions =
            [condition("Launched", "True", "Launched", at), condition("Ready", "Unknown", "ReconcilingDependents", at)];
        state.apply_claim(claim(&conditions, Some(at)));
        let of_pool = json!({"conditions": [condition("Ready", "False", "NodeClassNotReady", at)]});
        state.apply_pool(objects::node_pool("p", &json!({"status": of_pool})));
        let ready = json!({"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]});
        let own = json!({(labels::NODE_POOL): "p", (labels::INITIALIZED): "true"});
        state.apply_node(objects::node("n", &json!({"metadata": {"labels": own}, "status": ready})));
        let lines = lines(state).await;
        let of_claim = "karpenter_k8s_aws_ec2nodeclass=\"default\",karpenter_sh_nodepool=\"p\"";
        for line in [
            format!("operator_nodeclaim_status_condition_count{{name=\"c\",type=\"Launched\",status=\"True\",reason=\"Launched\",{of_claim}}} 1"),
            format!("operator_nodeclaim_status_condition_count{{name=\"c\",type=\"Ready\",status=\"Unknown\",reason=\"ReconcilingDependents\",{of_claim}}} 1"),
            "operator_nodepool_status_condition_count{name=\"p\",type=\"Ready\",status=\"False\",reason=\"NodeClassNotReady\"} 1".to_owned(),
            "operator_node_status_condition_count{name=\"n\",type=\"Ready\",status=\"True\",reason=\"KubeletReady\",karpenter_sh_nodepool=\"p\",karpenter_sh_initialized=\"true\"} 1".to_owned(),
        ] {
            assert!(lines.contains(&line), "{line} in\n{}", lines.join("\n"));
        }
        let value = |name: &str| {
            let line = lines.iter().find(|line| line.starts_with(&format!("{name}{{name=\"c\","))).unwrap();
            line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        };
        let expected = clock::now().saturating_since(UnixMillis::parse_rfc3339(at).unwrap()).as_secs_f64();
        for name in [
            "operator_nodeclaim_status_condition_current_status_seconds",
            "operator_nodeclaim_termination_current_time_seconds",
        ] {
            assert!((value(name) / expected - 1.0).abs() < 0.01, "{name}");
        }
        assert_eq!(lines.iter().filter(|line| line.starts_with("# TYPE ")).count(), 12);
    }

    #[test]
    fn the_kinds_of_transitions_that_are_counted_are_bounded() {
        let mut counted = Counted::default();
        let reasons: Vec<String> = (0..=MAX_COUNTED).map(|number| number.to_string()).collect();
        let view = |reason: &'static str| ConditionView {
            kind: "T",
            status: "True",
            reason,
            message: "",
            since: UnixMillis(0),
        };
        let in_pool = |pool: &str| ObjectMeta {
            labels: Some([(labels::NODE_POOL.to_owned(), pool.to_owned())].into()),
            ..ObjectMeta::default()
        };
        let meta = in_pool("p");
        assert!(counted.admit::<Node>(&view("first"), &meta));
        for reason in &reasons {
            counted.admit::<Node>(&ConditionView { reason, ..view("") }, &meta);
        }
        assert!(counted.admit::<Node>(&view("first"), &meta) && !counted.admit::<Node>(&view("last"), &meta));
        assert!(!counted.admit::<Node>(&view("first"), &in_pool("forged")), "labels count, too");
        assert_eq!(counted.0.len(), MAX_COUNTED);
    }

    #[test]
    fn transitions_and_ends_are_counted_with_how_long_they_took() {
        let metrics = Metrics::new();
        let own = ControllerMetrics::new(metrics.registry()).unwrap();
        let [first, later] = ["2026-01-01T00:00:00Z", "2026-01-01T00:00:20Z"];
        let waits = Arc::new(claim(&[condition("Registered", "Unknown", "AwaitingReconciliation", first)], None));
        let registered = Arc::new(claim(&[condition("Registered", "True", "Registered", later)], Some(later)));
        let changes = [
            Change { old: None, new: Some(Arc::clone(&waits)) },
            Change { old: Some(waits), new: Some(Arc::clone(&registered)) },
            Change { old: Some(registered), new: None },
        ];
        count(
            &own.claim_conditions,
            &mut Counted::default(),
            &changes,
            UnixMillis::parse_rfc3339("2026-01-01T00:01:20Z").unwrap(),
        );
        let text = metrics.text().unwrap();
        let of_claim = "karpenter_k8s_aws_ec2nodeclass=\"default\",karpenter_sh_nodepool=\"p\"";
        for line in [
            format!(
                "operator_nodeclaim_status_condition_transitions_total{{{of_claim},reason=\"AwaitingReconciliation\",status=\"Unknown\",type=\"Registered\"}} 1"
            ),
            format!(
                "operator_nodeclaim_status_condition_transitions_total{{{of_claim},reason=\"Registered\",status=\"True\",type=\"Registered\"}} 1"
            ),
            format!(
                "operator_nodeclaim_status_condition_transition_seconds_sum{{{of_claim},status=\"Unknown\",type=\"Registered\"}} 20"
            ),
            format!("operator_nodeclaim_termination_duration_seconds_sum{{{of_claim}}} 60"),
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }
}
