//! Kubernetes pods to interned classes. Strings are parsed here once and nowhere else.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Pod, PodSpec, PodStatus, Toleration as ApiToleration};
use stowage_model::pod_class::{NodeTerm, PodClass, Toleration};
use stowage_model::resources::{ResourceError, Resources};
use stowage_model::time::UnixMillis;

use crate::input::default_spread::{CONTROLLER, DefaultSpread, spreading_controller};
use crate::input::intern_table::InternTable;
use crate::input::pod::{Daemon, Labels, PodEntry};
use crate::input::pod_rules::{host_ports, node_terms, pod_term, spread, toleration};
use crate::input::terms::TermError;

/// A pod that is excluded from planning.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{pod}: {problem}")]
pub struct PodError {
    /// `namespace/name` of the pod or DaemonSet.
    pub pod: String,
    /// Field and error.
    #[source]
    pub problem: PodProblem,
}

/// The error of a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PodProblem {
    /// No name or no spec.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A quantity.
    #[error("spec.containers resources: resource {}: {}", .0.resource, .0.source)]
    Resources(ResourceError),
    /// A selector or affinity term.
    #[error(transparent)]
    Term(#[from] TermError),
}

/// Shares equal classes, label sets and names, so that a pod costs a few hundred bytes. What no pod uses any more is dropped.
#[derive(Debug, Default)]
pub struct Interner {
    classes: InternTable<PodClass>,
    labels: InternTable<Labels>,
    strings: InternTable<str>,
    no_claims: Arc<[Arc<str>]>,
    default_spread: DefaultSpread,
}

impl Interner {
    /// With default topology spread for pods without constraints of their own.
    pub fn with_default_spread(default_spread: DefaultSpread) -> Self {
        Self { default_spread, ..Self::default() }
    }

    /// Sizes of the tables, by name.
    pub fn sizes(&self) -> [(&'static str, usize); 3] {
        [
            ("interned_classes", self.classes.size()),
            ("interned_labels", self.labels.size()),
            ("interned_names", self.strings.size()),
        ]
    }

    /// Parses a pod.
    ///
    /// # Errors
    /// The pod has no name or spec, or an invalid quantity, operator or field.
    pub fn intern(&mut self, pod: &Pod) -> Result<PodEntry, PodError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let key: Arc<str> = Arc::from(format!("{namespace}/{name}"));
        let fail = |problem| PodError { pod: key.to_string(), problem };
        if name.is_empty() {
            return Err(fail(PodProblem::Missing("metadata.name")));
        }
        let spec = pod.spec.as_ref().ok_or_else(|| fail(PodProblem::Missing("spec")))?;
        let controller = spreading_controller(pod).filter(|_| !self.default_spread.is_empty());
        let mut read = self.class(namespace, pod.metadata.labels.as_ref(), spec, &[], controller, pod.status.as_ref());
        if read.is_err() && spec.node_name.is_some() {
            // The pod runs, although its constraints are invalid: its requests must not count as free.
            let bare = PodSpec { affinity: None, topology_spread_constraints: None, ..spec.clone() };
            read = self.class(namespace, pod.metadata.labels.as_ref(), &bare, &[], controller, pod.status.as_ref());
        }
        let class = read.map_err(fail)?;
        let marked = controller.map(|uid| {
            let mut labels = pod.metadata.labels.clone().unwrap_or_default();
            labels.insert(CONTROLLER.to_owned(), uid.to_owned());
            labels
        });
        let owner = pod.metadata.owner_references.iter().flatten().find(|o| o.controller == Some(true));
        Ok(PodEntry {
            uid: Arc::from(pod.metadata.uid.as_deref().unwrap_or_default()),
            labels: self.labels(marked.as_ref().or(pod.metadata.labels.as_ref())),
            class,
            claims: self.claims(namespace, name, spec),
            owner: owner.map(|o| self.string(&o.uid)),
            created_at: pod.metadata.creation_timestamp.as_ref().map_or(UnixMillis(0), UnixMillis::from),
            queued_at: UnixMillis(0),
            deleting: pod.metadata.deletion_timestamp.is_some(),
            key,
        })
    }

    /// Parses a DaemonSet as the pod that it runs on each node, with the tolerations that its controller adds.
    ///
    /// # Errors
    /// As [`Interner::intern`].
    pub fn intern_daemon(&mut self, daemon_set: &DaemonSet) -> Result<Daemon, PodError> {
        let namespace = daemon_set.metadata.namespace.as_deref().unwrap_or("default");
        let name = daemon_set.metadata.name.as_deref().unwrap_or_default();
        let key: Arc<str> = Arc::from(format!("{namespace}/{name}"));
        let fail = |problem| PodError { pod: key.to_string(), problem };
        let template = daemon_set.spec.as_ref().map(|spec| &spec.template);
        let spec =
            template.and_then(|t| t.spec.as_ref()).ok_or_else(|| fail(PodProblem::Missing("spec.template.spec")))?;
        let labels = template.and_then(|t| t.metadata.as_ref()).and_then(|m| m.labels.as_ref());
        let mut class = self.class(namespace, labels, spec, &DAEMON_TOLERATIONS, None, None).map_err(fail)?;
        if class.claims_devices {
            // Its pods need devices that no new node has: they reserve nothing.
            Arc::make_mut(&mut class).node_terms = vec![NodeTerm { never: true, ..NodeTerm::default() }];
        }
        Ok(Daemon { key, class, labels: self.labels(labels) })
    }

    fn labels(&mut self, labels: Option<&Labels>) -> Arc<Labels> {
        static NONE: Labels = Labels::new();
        let labels = labels.unwrap_or(&NONE);
        self.labels.get(labels).unwrap_or_else(|| self.labels.insert(labels.clone(), bytes_of_labels(labels)))
    }

    /// The claims of a pod; those of ephemeral volumes are named after the pod.
    fn claims(&mut self, namespace: &str, pod: &str, spec: &PodSpec) -> Arc<[Arc<str>]> {
        let names = spec.volumes.iter().flatten().filter_map(|volume| match &volume.persistent_volume_claim {
            Some(claim) => Some(format!("{namespace}/{}", claim.claim_name)),
            None => volume.ephemeral.as_ref().map(|_| format!("{namespace}/{pod}-{}", volume.name)),
        });
        let names: BTreeSet<String> = names.collect();
        if names.is_empty() {
            return Arc::clone(&self.no_claims);
        }
        names.iter().map(|name| self.string(name)).collect()
    }

    fn string(&mut self, text: &str) -> Arc<str> {
        self.strings.get(text).unwrap_or_else(|| self.strings.insert(text, text.len()))
    }

    fn class(
        &mut self,
        namespace: &str,
        labels: Option<&Labels>,
        spec: &PodSpec,
        extra_tolerations: &[(&str, &str)],
        controller: Option<&str>,
        status: Option<&PodStatus>,
    ) -> Result<Arc<PodClass>, PodProblem> {
        static NONE: Labels = Labels::new();
        let labels = labels.unwrap_or(&NONE);
        let mut tolerations: Vec<Toleration> =
            spec.tolerations.iter().flatten().filter(|api| own(api)).map(toleration).collect();
        tolerations.extend(extra_tolerations.iter().map(|(key, effect)| Toleration {
            key: Arc::from(*key),
            exists: true,
            value: Arc::default(),
            effect: Arc::from(*effect),
        }));
        tolerations.sort();
        tolerations.dedup();
        let mut class = PodClass {
            namespace: self.string(namespace),
            requests: Resources::of_running_pod(spec, status).map_err(PodProblem::Resources)?,
            priority: spec.priority.unwrap_or(0),
            tolerations,
            host_ports: host_ports(spec),
            claims_devices: spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()),
            ..PodClass::default()
        };
        node_terms(spec, &mut class)?;
        for constraint in spec.topology_spread_constraints.iter().flatten() {
            class.spread.push(spread(constraint, labels)?);
        }
        if let Some(uid) = controller.filter(|_| class.spread.is_empty()) {
            class.spread = self.default_spread.of_controller(uid);
        }
        let affinity = spec.affinity.as_ref();
        if let Some(pods) = affinity.and_then(|a| a.pod_affinity.as_ref()) {
            for term in pods.required_during_scheduling_ignored_during_execution.iter().flatten() {
                class.affinity.push(pod_term(term, namespace, labels)?);
            }
            for weighted in pods.preferred_during_scheduling_ignored_during_execution.iter().flatten() {
                let term = pod_term(&weighted.pod_affinity_term, namespace, labels)?;
                class.preferred_affinity.push((weighted.weight, term));
            }
        }
        if let Some(pods) = affinity.and_then(|a| a.pod_anti_affinity.as_ref()) {
            for term in pods.required_during_scheduling_ignored_during_execution.iter().flatten() {
                class.anti_affinity.push(pod_term(term, namespace, labels)?);
            }
            for weighted in pods.preferred_during_scheduling_ignored_during_execution.iter().flatten() {
                let term = pod_term(&weighted.pod_affinity_term, namespace, labels)?;
                class.preferred_anti_affinity.push((weighted.weight, term));
            }
        }
        class.preferred_affinity.sort_by_key(|(weight, _)| -weight);
        class.preferred_anti_affinity.sort_by_key(|(weight, _)| -weight);
        if let Some(shared) = self.classes.get(&class) {
            return Ok(shared);
        }
        let bytes = size_of::<PodClass>() + bytes_of_constraints(spec, labels) + bytes_of_requests(&class);
        Ok(self.classes.insert(class, bytes))
    }
}

/// About the memory of a label set.
fn bytes_of_labels(labels: &Labels) -> usize {
    labels.iter().map(|(key, value)| 2 * size_of::<String>() + key.len() + value.len()).sum()
}

/// About the memory of the extended resources and host ports of a class: a pod may have thousands of each.
fn bytes_of_requests(class: &PodClass) -> usize {
    let resources: usize = class.requests.extended.keys().map(|name| name.len() + 3 * size_of::<Arc<str>>()).sum();
    resources + std::mem::size_of_val(&*class.host_ports)
}

/// About the memory of the constraints of a pod: their parsed form is as long as their JSON, twice at most.
fn bytes_of_constraints(spec: &PodSpec, labels: &Labels) -> usize {
    let length = |json: serde_json::Result<String>| json.map_or(0, |text| text.len());
    let own = length(serde_json::to_string(&spec.affinity))
        + length(serde_json::to_string(&spec.node_selector))
        + length(serde_json::to_string(&spec.tolerations));
    let spread = length(serde_json::to_string(&spec.topology_spread_constraints));
    // `matchLabelKeys` copies values of labels.
    let copied = if spread > 0 { bytes_of_labels(labels).min(spread * 64) } else { 0 };
    2 * (own + spread) + copied
}

/// Tolerations that the DaemonSet controller adds to its pods.
const DAEMON_TOLERATIONS: [(&str, &str); 7] = [
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
    ("node.kubernetes.io/network-unavailable", "NoSchedule"),
];

/// Whether a toleration is the pod's own. The toleration of a planned taint must not split the pods of one workload into classes.
fn own(api: &ApiToleration) -> bool {
    api.key.as_deref() != Some(stowage_model::labels::PLANNED_TAINT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(name: &str, labels: &Value, spec: &Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "ns", "labels": labels}, "spec": spec}))
            .unwrap()
    }

    #[test]
    fn pods_with_equal_constraints_share_class_and_labels() {
        let mut interner = Interner::default();
        let spec = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]});
        let a = interner.intern(&pod("a", &json!({"app": "x"}), &spec)).unwrap();
        let b = interner.intern(&pod("b", &json!({"app": "x"}), &spec)).unwrap();
        let other = interner.intern(&pod("c", &json!({"app": "y"}), &spec)).unwrap();
        assert!(Arc::ptr_eq(&a.class, &b.class) && Arc::ptr_eq(&a.labels, &b.labels));
        assert!(Arc::ptr_eq(&a.class, &other.class), "labels are not part of the class");
        assert!(!Arc::ptr_eq(&a.labels, &other.labels));
        assert_eq!(&*a.key, "ns/a");
        assert_eq!(&*a.class.namespace, "ns");
    }

    #[test]
    fn b34_match_label_keys_use_the_pods_values_and_ignore_absent_keys() {
        let spec = json!({"containers": [], "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "failure-domain.beta.kubernetes.io/zone",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "x"}},
            "matchLabelKeys": ["pod-template-hash", "absent"]}]});
        let labels = json!({"app": "x", "pod-template-hash": "v2"});
        let class = Interner::default().intern(&pod("a", &labels, &spec)).unwrap().class;
        let spread = &class.spread[0];
        assert_eq!(&*spread.key, "topology.kubernetes.io/zone");
        let selector = spread.selector.as_ref().unwrap();
        let of = |hash: &str| Labels::from([("app".into(), "x".into()), ("pod-template-hash".into(), hash.into())]);
        assert!(selector.selects(&of("v2")) && !selector.selects(&of("v1")));
        assert_eq!(selector.terms.len(), 2);
    }

    #[test]
    fn b33_a_term_without_namespaces_selects_in_the_pods_namespace() {
        let term = |extra: Value| {
            let mut term = json!({"topologyKey": "kubernetes.io/hostname", "labelSelector": {}});
            term.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let spec = json!({"containers": [], "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}});
            Interner::default().intern(&pod("a", &json!({"t": "1"}), &spec)).unwrap().class.anti_affinity[0].clone()
        };
        assert_eq!(term(json!({})).namespaces.names, [Arc::from("ns")].into());
        assert_eq!(term(json!({"namespaces": ["b"]})).namespaces.names, [Arc::from("b")].into());
        let selected = term(json!({"namespaceSelector": {}})).namespaces;
        assert!(selected.names.is_empty() && selected.selector.is_some());
        let mismatch = term(json!({"mismatchLabelKeys": ["t"]})).selector.unwrap();
        assert!(!mismatch.selects(&Labels::from([("t".into(), "1".into())])));
    }

    #[test]
    fn b06_node_selector_terms_are_ored_and_each_includes_the_node_selector() {
        let spec = json!({"containers": [], "nodeSelector": {"beta.kubernetes.io/arch": "arm64"}, "affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "z", "operator": "In", "values": ["1"]}]},
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}, {}]}}}});
        let class = Interner::default().intern(&pod("a", &json!({}), &spec)).unwrap().class;
        let labels =
            |arch: &str, z: &str| Labels::from([("kubernetes.io/arch".into(), arch.into()), ("z".into(), z.into())]);
        assert!(class.accepts_node(&labels("arm64", "1"), "m"));
        assert!(!class.accepts_node(&labels("amd64", "1"), "m"));
        assert!(class.accepts_node(&labels("arm64", "2"), "n"));
        assert!(!class.accepts_node(&labels("arm64", "2"), "m"), "an empty term matches no node");
    }

    #[test]
    fn pods_with_many_ports_or_resources_are_swept_early() {
        let ports: Vec<Value> = (1..5_000).map(|port| json!({"containerPort": port, "hostPort": port})).collect();
        let requests: serde_json::Map<_, _> =
            (0..5_000).map(|at| (format!("example.com/r-{at}"), json!("1"))).collect();
        for container in
            [json!({"name": "c", "ports": ports}), json!({"name": "c", "resources": {"requests": requests}})]
        {
            let mut interner = Interner::default();
            for priority in 0..60 {
                let spec = json!({"priority": priority, "containers": [container]});
                drop(interner.intern(&pod("a", &json!({}), &spec)).unwrap());
            }
            assert!(interner.classes.size() < 50, "{} classes", interner.classes.size());
        }
    }

    #[test]
    fn an_invalid_pod_is_an_error_with_its_name_and_field() {
        let quantity = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "lots"}}}]});
        let text = Interner::default().intern(&pod("a", &json!({}), &quantity)).unwrap_err().to_string();
        assert!(text.contains("ns/a") && text.contains("cpu") && text.contains("lots"), "{text}");
        let nameless: Pod = serde_json::from_value(json!({"spec": {"containers": []}})).unwrap();
        assert!(Interner::default().intern(&nameless).is_err());
    }

    #[test]
    fn a_daemon_has_the_tolerations_that_its_controller_adds() {
        let set: DaemonSet = serde_json::from_value(json!({"metadata": {"name": "d", "namespace": "kube-system"}, "spec": {
            "selector": {}, "template": {"spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80}]}], "hostNetwork": true}}}}))
        .unwrap();
        let daemon = Interner::default().intern_daemon(&set).unwrap();
        let taint = k8s_openapi::api::core::v1::Taint {
            key: "node.kubernetes.io/not-ready".into(),
            effect: "NoExecute".into(),
            ..Default::default()
        };
        assert!(daemon.class.tolerates(&taint));
        assert_eq!(daemon.class.host_ports[0].port, 80);
    }
}
