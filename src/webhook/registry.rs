//! The admission rules and their order. A new rule is a file with a `RULE`, a line here, and its id in the test.

use crate::webhook::rule::Rule;
use crate::webhook::{accelerator_requests, accelerator_tolerations, contradictions, do_not_evict, legacy_keys};

/// Every rule, in the order in which they run: tolerations follow from requests, and warnings refer to the final pod.
pub static RULES: &[Rule] = &[
    legacy_keys::RULE,
    do_not_evict::RULE,
    accelerator_requests::RULE,
    accelerator_tolerations::RULE,
    contradictions::RULE,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_their_order_never_change() {
        let ids: Vec<&str> = RULES.iter().map(|rule| rule.id).collect();
        assert_eq!(ids, ["n1", "n9", "n22", "n13", "n11"], "a new rule adds its id here; nothing else changes");
    }
}
