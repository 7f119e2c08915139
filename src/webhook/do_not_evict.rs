//! `n9`: `karpenter.sh/do-not-evict: "true"`, dropped in Karpenter v1, also becomes `karpenter.sh/do-not-disrupt: "true"`.
//! The old annotation stays, since other tools may read it. An existing value of the current annotation never changes.

use serde_json::Value;
use stowage_model::labels::{DO_NOT_DISRUPT, DO_NOT_EVICT};

use crate::webhook::rule::Rule;

pub(crate) const RULE: Rule = Rule {
    id: "n9",
    summary: r#"`karpenter.sh/do-not-evict: "true"` is copied to `karpenter.sh/do-not-disrupt`, unless that annotation is set."#,
    apply,
    warnings: Rule::warns_of_nothing,
};

fn apply(pod: &mut Value) -> bool {
    let Some(annotations) = pod.pointer_mut("/metadata/annotations").and_then(Value::as_object_mut) else {
        return false;
    };
    if annotations.get(DO_NOT_EVICT).and_then(Value::as_str) != Some("true") || annotations.contains_key(DO_NOT_DISRUPT)
    {
        return false;
    }
    annotations.insert(DO_NOT_DISRUPT.to_owned(), Value::from("true"));
    true
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_value_true_is_copied_and_only_to_an_absent_annotation() {
        for (annotations, expected) in [
            (json!({DO_NOT_EVICT: "true"}), Some(json!({DO_NOT_EVICT: "true", DO_NOT_DISRUPT: "true"}))),
            (json!({DO_NOT_EVICT: "false"}), None),
            (json!({DO_NOT_EVICT: true}), None),
            (json!({DO_NOT_EVICT: "true", DO_NOT_DISRUPT: "false"}), None),
            (json!({DO_NOT_EVICT: "true", DO_NOT_DISRUPT: "10m"}), None),
            (json!({}), None),
            (json!(null), None),
        ] {
            let original = json!({"metadata": {"annotations": annotations}});
            let mut pod = original.clone();
            assert_eq!(apply(&mut pod), expected.is_some(), "{original}");
            let wanted = expected.map_or(original, |annotations| json!({"metadata": {"annotations": annotations}}));
            assert_eq!(pod, wanted);
        }
    }
}
