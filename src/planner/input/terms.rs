//! Node selector terms and label selectors of the Kubernetes API, parsed into sets of values.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::NodeSelectorTerm;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use stowage_model::pod_class::{NodeTerm, Selector};
use stowage_model::requirement::{RequirementError, Requirements, ValueSet};

/// A term or selector that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TermError {
    /// A requirement of a selector or affinity term.
    #[error("{field}: {error}")]
    Requirement {
        /// Field path.
        field: &'static str,
        error: RequirementError,
    },
    /// `matchFields` on a field other than the name.
    #[error("spec.affinity.nodeAffinity: matchFields on {0:?} is not supported, only metadata.name is")]
    MatchFields(String),
}

/// Parses one alternative of a node selector.
pub(crate) fn node_term(api: &NodeSelectorTerm) -> Result<NodeTerm, TermError> {
    const FIELD: &str = "spec.affinity.nodeAffinity";
    let expressions = api.match_expressions.as_deref().unwrap_or_default();
    let fields = api.match_fields.as_deref().unwrap_or_default();
    let mut labels = Requirements::default();
    for e in expressions {
        let values = e.values.as_deref().unwrap_or_default();
        let set = ValueSet::parse(&e.key, &e.operator, values)
            .map_err(|error| TermError::Requirement { field: FIELD, error })?;
        labels.require(&e.key, &set);
    }
    let mut name: Option<ValueSet> = None;
    for f in fields {
        if f.key != "metadata.name" {
            return Err(TermError::MatchFields(f.key.clone()));
        }
        let set = ValueSet::parse(&f.key, &f.operator, f.values.as_deref().unwrap_or_default())
            .map_err(|error| TermError::Requirement { field: FIELD, error })?;
        name = Some(name.map_or_else(|| set.clone(), |have| have.intersect(&set)));
    }
    Ok(NodeTerm { labels, name, never: expressions.is_empty() && fields.is_empty() })
}

/// Parses the label selector in this field of a pod.
///
/// # Errors
/// An operator is unknown; the error names the field.
pub fn selector(api: &LabelSelector, field: &'static str) -> Result<Selector, TermError> {
    let mut terms: BTreeMap<Arc<str>, ValueSet> = BTreeMap::new();
    let mut require = |key: &str, set: ValueSet| {
        let joined = terms.get(key).map_or_else(|| set.clone(), |have| have.intersect(&set));
        terms.insert(Arc::from(key), joined);
    };
    for (key, value) in api.match_labels.iter().flatten() {
        require(key, ValueSet::one(value));
    }
    for e in api.match_expressions.iter().flatten() {
        let set = ValueSet::parse(&e.key, &e.operator, e.values.as_deref().unwrap_or_default())
            .map_err(|error| TermError::Requirement { field, error })?;
        require(&e.key, set);
    }
    Ok(Selector { terms: terms.into_iter().collect() })
}
