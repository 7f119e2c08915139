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

/// The rules that a replica applies, in the order of [`RULES`].
#[derive(Clone, Debug)]
pub struct Rules(Vec<&'static Rule>);

impl Default for Rules {
    /// Every rule.
    fn default() -> Self {
        Self::without(&[])
    }
}

impl Rules {
    /// Every rule but those with these ids.
    pub fn without(disabled: &[&'static str]) -> Self {
        Self(RULES.iter().filter(|rule| !disabled.contains(&rule.id)).collect())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &'static Rule> {
        self.0.iter().copied()
    }
}

/// Parses the id of a rule.
///
/// # Errors
/// No rule has it; the error lists all ids.
pub fn parse_id(text: &str) -> Result<&'static str, String> {
    let known = RULES.iter().map(|rule| rule.id).find(|id| *id == text.trim());
    known.ok_or_else(|| {
        let ids: Vec<&str> = RULES.iter().map(|rule| rule.id).collect();
        format!("no admission rule has this id, expected ids of {}", ids.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_their_order_never_change() {
        let ids: Vec<&str> = RULES.iter().map(|rule| rule.id).collect();
        assert_eq!(ids, ["n1", "n9", "n22", "n13", "n11"], "a new rule adds its id here; nothing else changes");
    }

    #[test]
    fn a_disabled_rule_is_left_out_and_the_others_keep_their_order() {
        let ids = |disabled: &[&'static str]| Rules::without(disabled).iter().map(|rule| rule.id).collect::<Vec<_>>();
        assert_eq!(ids(&[]), ["n1", "n9", "n22", "n13", "n11"]);
        assert_eq!(ids(&["n13", "n1"]), ["n9", "n22", "n11"]);
        assert_eq!(parse_id(" n9"), Ok("n9"));
        assert!(parse_id("n99").unwrap_err().contains("n1, n9, n22, n13, n11"));
    }
}
