//! Conjunction of two lists of alternative node terms.

use std::collections::BTreeSet;

use stowage_model::pod_class::NodeTerm;

/// Maximum alternatives in a conjunction.
const MAX_TERMS: usize = 64;

/// Terms that satisfy both lists of ORed terms; an empty list accepts every node. Contradictions are dropped.
pub(crate) fn both(left: &[NodeTerm], right: &[NodeTerm]) -> Vec<NodeTerm> {
    if left.is_empty() || right.is_empty() {
        return if left.is_empty() { right.to_vec() } else { left.to_vec() };
    }
    let pairs = left.iter().flat_map(|a| right.iter().map(|b| a.and(b)));
    let possible = pairs.filter(|term| {
        !term.never && term.labels.contradiction().is_none() && term.name.as_ref().is_none_or(|set| !set.is_empty())
    });
    let distinct: BTreeSet<NodeTerm> = possible.collect();
    distinct.into_iter().take(MAX_TERMS).collect()
}
