//! Whether an existing node satisfies a pod's required node constraints, as kube-scheduler evaluates them.

use crate::model::labels;
use crate::model::labels::normalize_key;
use crate::model::pod_class::{NodeTerm, PodClass};
use crate::planner::input::problem::NodeState;

/// A node's value of a label; the host name is the node's name where the label is missing.
pub(crate) fn node_label<'n>(node: &'n NodeState, key: &str) -> Option<&'n str> {
    node.labels
        .get(key)
        .or_else(|| node.labels.iter().find(|(have, _)| normalize_key(have) == key).map(|(_, value)| value))
        .map(String::as_str)
        .or_else(|| (key == labels::HOSTNAME).then_some(&*node.name))
}

/// Whether a class's required node terms, volumes and tolerations admit a node.
pub(crate) fn admits(class: &PodClass, node: &NodeState) -> bool {
    class.untolerated(&node.taints).is_none()
        && accepted(&class.node_terms, node)
        && accepted(&class.volume_terms, node)
}

/// Whether one of `terms` accepts a node, or there are none.
pub(crate) fn accepted(terms: &[NodeTerm], node: &NodeState) -> bool {
    let accepts = |term: &NodeTerm| {
        !term.never
            && term.labels.iter().all(|(key, set)| set.accepts(node_label(node, key)))
            && term.name.as_ref().is_none_or(|set| set.contains(&node.name))
    };
    terms.is_empty() || terms.iter().any(accepts)
}
