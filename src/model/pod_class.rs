//! Pod classes: pods with equal requests and constraints. Labels are not part of a class.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;

use crate::labels;
use crate::requirement::{Requirements, ValueSet};
use crate::resources::Resources;

/// Everything that scheduling considers, except identity and labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodClass {
    /// Namespace.
    pub namespace: Arc<str>,
    /// Requests, one pod slot included.
    pub requests: Resources,
    /// Priority.
    pub priority: i32,
    /// Required node terms, ORed, the node selector merged into each; empty accepts every node.
    pub node_terms: Vec<NodeTerm>,
    /// Nodes that can attach its volumes, ORed; empty is every node. Set by the planner only.
    pub volume_terms: Vec<NodeTerm>,
    /// Preferred node terms, heaviest first.
    pub preferred_nodes: Vec<(i32, NodeTerm)>,
    /// Tolerations.
    pub tolerations: Vec<Toleration>,
    /// Topology spread constraints.
    pub spread: Vec<Spread>,
    /// Required pod affinity terms.
    pub affinity: Vec<PodTerm>,
    /// Required pod anti-affinity terms.
    pub anti_affinity: Vec<PodTerm>,
    /// Preferred pod affinity terms, heaviest first.
    pub preferred_affinity: Vec<(i32, PodTerm)>,
    /// Preferred pod anti-affinity terms, heaviest first.
    pub preferred_anti_affinity: Vec<(i32, PodTerm)>,
    /// Ports on the host.
    pub host_ports: Vec<HostPort>,
    /// It has `resourceClaims` (dynamic resource allocation), which no new node can be chosen for.
    pub claims_devices: bool,
}

impl PodClass {
    /// Whether the required node terms accept a node with these labels and this name.
    pub fn accepts_node(&self, labels: &BTreeMap<String, String>, name: &str) -> bool {
        self.node_terms.is_empty() || self.node_terms.iter().any(|term| term.accepts(labels, name))
    }

    /// Whether a taint keeps the pod off a node. `PreferNoSchedule` never does.
    pub fn tolerates(&self, taint: &Taint) -> bool {
        taint.effect == "PreferNoSchedule" || self.tolerations.iter().any(|t| t.tolerates(taint))
    }

    /// The first taint that keeps the pod off a node.
    pub fn untolerated<'t>(&self, taints: &'t [Taint]) -> Option<&'t Taint> {
        taints.iter().find(|taint| !self.tolerates(taint))
    }
}

/// One alternative of a required node affinity, or one preferred term.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeTerm {
    /// Requirements on labels.
    pub labels: Requirements,
    /// `matchFields` on `metadata.name`.
    pub name: Option<ValueSet>,
    /// A term without expressions and fields matches no node.
    pub never: bool,
}

impl NodeTerm {
    /// Whether the term accepts a node with these labels and this name.
    pub fn accepts(&self, labels: &BTreeMap<String, String>, name: &str) -> bool {
        !self.never
            && self.labels.iter().all(|(key, set)| set.accepts(labels::of_node(labels, name, key)))
            && self.name.as_ref().is_none_or(|set| set.contains(name))
    }

    /// The conjunction of both terms.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let mut out = self.clone();
        for (key, set) in other.labels.iter() {
            out.labels.require(key, set);
        }
        out.name = match (&self.name, &other.name) {
            (Some(a), Some(b)) => Some(a.intersect(b)),
            (a, b) => a.clone().or_else(|| b.clone()),
        };
        out.never |= other.never;
        out
    }
}

/// A toleration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Toleration {
    /// Key; empty with `Exists` tolerates every key.
    pub key: Arc<str>,
    /// `Exists` rather than `Equal`.
    pub exists: bool,
    /// Value for `Equal`.
    pub value: Arc<str>,
    /// Effect; empty is every effect.
    pub effect: Arc<str>,
}

impl Toleration {
    /// Whether this toleration tolerates `taint`, as the scheduler's `ToleratesTaint`.
    pub fn tolerates(&self, taint: &Taint) -> bool {
        (self.effect.is_empty() || *self.effect == *taint.effect)
            && (if self.key.is_empty() { self.exists } else { *self.key == *taint.key })
            && (self.exists || *self.value == *taint.value.as_deref().unwrap_or_default())
    }
}

/// A selector of pods by label. No terms select every pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Selector {
    /// Requirements, sorted by key; all must hold.
    pub terms: Vec<(Arc<str>, ValueSet)>,
}

impl Selector {
    /// Whether these labels are selected.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.terms.iter().all(|(key, set)| set.accepts(labels.get(key.as_ref()).map(String::as_str)))
    }
}

/// Namespaces that a pod term covers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespaces {
    /// By name.
    pub names: BTreeSet<Arc<str>>,
    /// By label, besides the names.
    pub selector: Option<Selector>,
}

/// A pod affinity or anti-affinity term. `matchLabelKeys` and `mismatchLabelKeys` are already in the selector.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodTerm {
    /// Topology key.
    pub key: Arc<str>,
    /// Selected pods; `None` selects no pod.
    pub selector: Option<Selector>,
    /// Namespaces of the selected pods.
    pub namespaces: Namespaces,
}

/// A topology spread constraint. `matchLabelKeys` are already in the selector.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Spread {
    /// Topology key.
    pub key: Arc<str>,
    /// `maxSkew`: maximum difference of counts between domains; at least 1.
    pub max_skew: i64,
    /// `minDomains`: with fewer domains, the global minimum is zero.
    pub min_domains: i64,
    /// Selector of the counted pods; `None` selects no pod.
    pub selector: Option<Selector>,
    /// `DoNotSchedule`.
    pub hard: bool,
    /// `nodeAffinityPolicy: Honor`: only nodes the pod may use are domains.
    pub honor_affinity: bool,
    /// `nodeTaintsPolicy: Honor`: only nodes whose taints are tolerated are domains.
    pub honor_taints: bool,
}

/// A port on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPort {
    /// Port.
    pub port: i32,
    /// TCP, UDP or SCTP.
    pub protocol: Arc<str>,
    /// Address; empty is every address.
    pub ip: Arc<str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_toleration_matches_the_same_taints_as_in_kube_scheduler() {
        let taint = Taint {
            key: "dedicated".into(),
            value: Some("gpu".into()),
            effect: "NoSchedule".into(),
            ..Taint::default()
        };
        for (key, exists, value, effect, want) in [
            ("dedicated", false, "gpu", "NoSchedule", true),
            ("dedicated", false, "gpu", "", true),
            ("dedicated", false, "cpu", "NoSchedule", false),
            ("dedicated", true, "", "NoSchedule", true),
            ("dedicated", true, "", "NoExecute", false),
            ("", true, "", "", true),
            ("", false, "gpu", "", false),
            ("other", true, "", "", false),
        ] {
            let toleration = Toleration { key: key.into(), exists, value: value.into(), effect: effect.into() };
            assert_eq!(toleration.tolerates(&taint), want, "{toleration:?}");
        }
        let soft = Taint { effect: "PreferNoSchedule".into(), ..taint };
        assert!(PodClass::default().tolerates(&soft));
    }
}
