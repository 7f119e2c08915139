//! `n11`: warns when no node can satisfy both the nodeSelector and the required node affinity. The pod stays unchanged: only its author
//! knows which constraint is wrong.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::webhook::raw_pod::{REQUIRED_NODE_TERMS, list, text};
use crate::webhook::rule::Rule;

pub(crate) const RULE: Rule = Rule {
    id: "n11",
    summary: "Warns when `nodeSelector` and required node affinity cannot both be satisfied. The pod is not changed.",
    apply: Rule::changes_nothing,
    warnings,
};

fn warnings(pod: &Value) -> Vec<String> {
    let mut selector = BTreeMap::new();
    if let Some(entries) = pod.pointer("/spec/nodeSelector").and_then(Value::as_object) {
        selector.extend(entries.iter().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?))));
    }
    let Some(required) = pod.pointer(REQUIRED_NODE_TERMS) else {
        return Vec::new();
    };
    // Terms are ORed: one satisfiable term is enough. An empty term matches no node.
    let mut conflicts = Vec::new();
    for term in list(required, "nodeSelectorTerms") {
        if list(term, "matchExpressions").is_empty() && list(term, "matchFields").is_empty() {
            continue;
        }
        match conflict(&selector, list(term, "matchExpressions")) {
            Some(conflict) => conflicts.push(conflict),
            None => return Vec::new(),
        }
    }
    conflicts.truncate(1);
    conflicts
}

/// The first pair of requirements of a term that contradict each other.
fn conflict(selector: &BTreeMap<&str, &str>, expressions: &[Value]) -> Option<String> {
    let mut allowed: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for expression in expressions {
        let key = text(expression, "key");
        let operator = text(expression, "operator");
        let values: BTreeSet<&str> = list(expression, "values").iter().filter_map(Value::as_str).collect();
        if let Some(value) = selector.get(key) {
            let possible = match operator {
                "In" => values.contains(value),
                "NotIn" => !values.contains(value),
                "DoesNotExist" => false,
                _ => true,
            };
            if !possible {
                return Some(format!("nodeSelector {key}={value} contradicts node affinity {key} {operator}"));
            }
        }
        if operator == "In" {
            let both = match allowed.get(key) {
                Some(before) => before.intersection(&values).copied().collect(),
                None => values,
            };
            if both.is_empty() {
                return Some(format!("node affinity allows no value of {key}"));
            }
            allowed.insert(key, both);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_pods_without_a_satisfiable_term_get_a_warning() {
        let zone = |operator: &str, values: &[&str]| json!({"key": "zone", "operator": operator, "values": values});
        for (terms, expected) in [
            (
                json!([{"matchExpressions": [zone("In", &["b"])]}]),
                vec!["nodeSelector zone=a contradicts node affinity zone In"],
            ),
            (
                json!([{"matchExpressions": [zone("NotIn", &["a"])]}]),
                vec!["nodeSelector zone=a contradicts node affinity zone NotIn"],
            ),
            (
                json!([{"matchExpressions": [zone("DoesNotExist", &[])]}]),
                vec!["nodeSelector zone=a contradicts node affinity zone DoesNotExist"],
            ),
            (json!([{"matchExpressions": [zone("In", &["a", "b"])]}]), vec![]),
            (json!([{"matchExpressions": [zone("In", &["b"])]}, {"matchExpressions": [zone("In", &["a"])]}]), vec![]),
            (
                json!([{"matchExpressions": [zone("In", &["b"])]}, {}]),
                vec!["nodeSelector zone=a contradicts node affinity zone In"],
            ),
            (
                json!([{"matchExpressions": [
                    {"key": "arch", "operator": "In", "values": ["x"]},
                    {"key": "arch", "operator": "In", "values": ["y"]}
                ]}]),
                vec!["node affinity allows no value of arch"],
            ),
            (json!([]), vec![]),
            (json!(null), vec![]),
        ] {
            let pod = json!({"spec": {
                "nodeSelector": {"zone": "a"},
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
            }});
            assert_eq!(warnings(&pod), expected, "{pod}");
        }
    }
}
