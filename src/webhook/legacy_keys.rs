//! `n1`: renames node label keys that Kubernetes replaced to their current keys, the only keys that new nodes carry.
//!
//! A nodeSelector entry stays when the current key is present with another value. A spread constraint stays when another constraint has
//! the current key and the same `whenUnsatisfiable`, since the API server rejects such a pair.

use std::collections::HashSet;

use serde_json::Value;

use crate::webhook::raw_pod::{NODE_AFFINITY, REQUIRED_NODE_TERMS, list, list_mut, text};
use crate::webhook::rule::Rule;

pub(crate) const RULE: Rule = Rule {
    id: "n1",
    summary: "Node label keys that Kubernetes replaced (`beta.kubernetes.io/*`, `failure-domain.beta.kubernetes.io/*`) are renamed to their current keys in node selectors, affinity and topology spread.",
    apply,
    warnings,
};

/// Legacy key, current key. From `k8s.io/api/core/v1/well_known_labels.go`.
const KEYS: [(&str, &str); 5] = [
    ("beta.kubernetes.io/arch", "kubernetes.io/arch"),
    ("beta.kubernetes.io/os", "kubernetes.io/os"),
    ("beta.kubernetes.io/instance-type", "node.kubernetes.io/instance-type"),
    ("failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"),
    ("failure-domain.beta.kubernetes.io/region", "topology.kubernetes.io/region"),
];

/// The current key of a legacy key.
fn current(key: &str) -> Option<&'static str> {
    KEYS.into_iter().find(|(legacy, _)| *legacy == key).map(|(_, current)| current)
}

fn apply(pod: &mut Value) -> bool {
    let mut changed = node_selector(pod);
    if let Some(required) = pod.pointer_mut(REQUIRED_NODE_TERMS) {
        for term in list_mut(required, "nodeSelectorTerms") {
            changed |= expressions(term);
        }
    }
    if let Some(affinity) = pod.pointer_mut(NODE_AFFINITY) {
        for preferred in list_mut(affinity, "preferredDuringSchedulingIgnoredDuringExecution") {
            if let Some(term) = preferred.get_mut("preference") {
                changed |= expressions(term);
            }
        }
    }
    changed |= spread_constraints(pod);
    for kind in ["/spec/affinity/podAffinity", "/spec/affinity/podAntiAffinity"] {
        let Some(affinity) = pod.pointer_mut(kind) else {
            continue;
        };
        for term in list_mut(affinity, "requiredDuringSchedulingIgnoredDuringExecution") {
            changed |= rename(term, "topologyKey");
        }
        for preferred in list_mut(affinity, "preferredDuringSchedulingIgnoredDuringExecution") {
            if let Some(term) = preferred.get_mut("podAffinityTerm") {
                changed |= rename(term, "topologyKey");
            }
        }
    }
    changed
}

/// A nodeSelector with both a legacy key and another value of the current key.
fn warnings(pod: &Value) -> Vec<String> {
    let Some(selector) = pod.pointer("/spec/nodeSelector").and_then(Value::as_object) else {
        return Vec::new();
    };
    KEYS.into_iter()
        .filter_map(|(legacy, current)| {
            let (old, new) = (selector.get(legacy)?.as_str()?, selector.get(current)?.as_str()?);
            (old != new).then(|| format!("nodeSelector: {legacy}={old} contradicts {current}={new}"))
        })
        .collect()
}

fn node_selector(pod: &mut Value) -> bool {
    let Some(selector) = pod.pointer_mut("/spec/nodeSelector").and_then(Value::as_object_mut) else {
        return false;
    };
    let mut changed = false;
    for (legacy, current) in KEYS {
        let movable = match (selector.get(legacy), selector.get(current)) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(old), Some(new)) => old == new,
        };
        if movable && let Some(value) = selector.remove(legacy) {
            selector.insert(current.to_owned(), value);
            changed = true;
        }
    }
    changed
}

/// Requirements of a term are ANDed, so each key can be renamed independently.
fn expressions(term: &mut Value) -> bool {
    let mut changed = false;
    for expression in list_mut(term, "matchExpressions") {
        changed |= rename(expression, "key");
    }
    changed
}

fn spread_constraints(pod: &mut Value) -> bool {
    let Some(spec) = pod.get_mut("spec") else { return false };
    let taken: HashSet<(String, String)> = list(spec, "topologySpreadConstraints")
        .iter()
        .map(|constraint| {
            (text(constraint, "topologyKey").to_owned(), text(constraint, "whenUnsatisfiable").to_owned())
        })
        .collect();
    let mut changed = false;
    for constraint in list_mut(spec, "topologySpreadConstraints") {
        let free = current(text(constraint, "topologyKey")).is_some_and(|current| {
            !taken.contains(&(current.to_owned(), text(constraint, "whenUnsatisfiable").to_owned()))
        });
        changed |= free && rename(constraint, "topologyKey");
    }
    changed
}

fn rename(object: &mut Value, member: &str) -> bool {
    let Some(current) = current(text(object, member)) else {
        return false;
    };
    object[member] = Value::from(current);
    true
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn applied(mut pod: Value) -> (bool, Value) {
        let changed = apply(&mut pod);
        (changed, pod)
    }

    #[test]
    fn every_legacy_key_is_renamed_in_the_node_selector() {
        for (legacy, current) in KEYS {
            let (changed, pod) = applied(json!({"spec": {"nodeSelector": {legacy: "v", "mine": "x"}}}));
            assert!(changed);
            assert_eq!(pod, json!({"spec": {"nodeSelector": {current: "v", "mine": "x"}}}));
        }
    }

    #[test]
    fn a_node_selector_with_both_keys_loses_the_legacy_one_only_when_they_agree() {
        let (legacy, current) = KEYS[0];
        let (changed, pod) = applied(json!({"spec": {"nodeSelector": {legacy: "arm64", current: "arm64"}}}));
        assert!(changed);
        assert_eq!(pod, json!({"spec": {"nodeSelector": {current: "arm64"}}}));
        let odd = json!({"spec": {"nodeSelector": {legacy: "arm64", current: "amd64"}}});
        assert_eq!(applied(odd.clone()), (false, odd.clone()));
        assert_eq!(
            warnings(&odd),
            ["nodeSelector: beta.kubernetes.io/arch=arm64 contradicts kubernetes.io/arch=amd64"]
        );
    }

    #[test]
    fn keys_are_renamed_everywhere_in_affinity_and_topology_spread() {
        let build = |zone: &str, arch: &str| {
            json!({"spec": {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                            {"matchExpressions": [{"key": zone, "operator": "In", "values": ["a"]}, {"key": "x", "operator": "Exists"}]},
                            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}
                        ]},
                        "preferredDuringSchedulingIgnoredDuringExecution": [
                            {"weight": 1, "preference": {"matchExpressions": [{"key": arch, "operator": "NotIn", "values": ["arm64"]}]}}
                        ]
                    },
                    "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": zone}]},
                    "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 1, "podAffinityTerm": {"topologyKey": zone}}
                    ]}
                },
                "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": zone, "whenUnsatisfiable": "DoNotSchedule"}]
            }})
        };
        let (changed, pod) = applied(build("failure-domain.beta.kubernetes.io/zone", "beta.kubernetes.io/arch"));
        assert!(changed);
        assert_eq!(pod, build("topology.kubernetes.io/zone", "kubernetes.io/arch"));
    }

    #[test]
    fn a_spread_constraint_stays_when_its_new_key_would_be_a_duplicate() {
        let pod = json!({"spec": {"topologySpreadConstraints": [
            {"topologyKey": "failure-domain.beta.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"},
            {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
        ]}});
        assert_eq!(applied(pod.clone()), (false, pod));
    }

    #[test]
    fn unexpected_shapes_are_ignored() {
        for pod in [
            json!({"spec": {}}),
            json!({"spec": null}),
            json!({"spec": {"nodeSelector": null, "affinity": null, "topologySpreadConstraints": null}}),
            json!({"spec": {"nodeSelector": [], "affinity": {"nodeAffinity": []}, "topologySpreadConstraints": {"a": 1}}}),
            json!({"spec": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [1, null, "x"]}}}}),
        ] {
            assert_eq!(applied(pod.clone()), (false, pod));
        }
    }
}
