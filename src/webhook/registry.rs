//! The admission rules and their order. A new rule is a file with a `RULE` and a line here.

use crate::webhook::rule::Rule;
use crate::webhook::{accelerator_requests, accelerator_tolerations, contradictions, do_not_evict, legacy_keys};

/// Every rule, in the order in which they run: tolerations follow from requests, and warnings refer to the final pod.
pub static RULES: [Rule; 5] = [
    legacy_keys::RULE,
    do_not_evict::RULE,
    accelerator_requests::RULE,
    accelerator_tolerations::RULE,
    contradictions::RULE,
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_are_distinct() {
        assert_eq!(RULES.iter().map(|rule| rule.id).collect::<BTreeSet<_>>().len(), RULES.len());
    }
}
