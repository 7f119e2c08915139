//! `n13`: a pod that requests an accelerator tolerates the `NoSchedule` taint named after it, as with the API server's
//! ExtendedResourceToleration plugin, which is off by default and on EKS.

use serde_json::{Value, json};

use crate::webhook::accelerator;
use crate::webhook::raw_pod::{array_mut, list, text};
use crate::webhook::rule::Rule;

pub(crate) const RULE: Rule = Rule {
    id: "n13",
    summary: "A pod that requests an accelerator tolerates the `NoSchedule` taint with the name of the resource.",
    apply,
    warnings: Rule::warns_of_nothing,
};

fn apply(pod: &mut Value) -> bool {
    let wanted = accelerator::requested(pod);
    let Some(spec) = pod.get_mut("spec") else { return false };
    let missing: Vec<Value> = wanted
        .into_iter()
        .filter(|resource| !list(spec, "tolerations").iter().any(|toleration| tolerates(toleration, resource)))
        .map(|resource| json!({"key": resource, "operator": "Exists", "effect": "NoSchedule"}))
        .collect();
    if missing.is_empty() {
        return false;
    }
    let Some(tolerations) = array_mut(spec, "tolerations") else {
        return false;
    };
    tolerations.extend(missing);
    true
}

/// Whether a toleration covers `key:NoSchedule` whatever the taint's value.
fn tolerates(toleration: &Value, key: &str) -> bool {
    let own = text(toleration, "key");
    let effect = text(toleration, "effect");
    text(toleration, "operator") == "Exists"
        && (own.is_empty() || own == key)
        && (effect.is_empty() || effect == "NoSchedule")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(tolerations: &Value) -> Value {
        json!({"spec": {
            "containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}],
            "initContainers": [{"restartPolicy": "Always", "resources": {"requests": {"vpc.amazonaws.com/efa": "1", "cpu": "1"}}}],
            "tolerations": tolerations
        }})
    }

    #[test]
    fn each_accelerator_of_any_container_gets_one_toleration() {
        let mut pod = pod(&json!([{"key": "mine", "operator": "Exists"}]));
        assert!(apply(&mut pod));
        assert_eq!(
            pod["spec"]["tolerations"],
            json!([
                {"key": "mine", "operator": "Exists"},
                {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
                {"key": "vpc.amazonaws.com/efa", "operator": "Exists", "effect": "NoSchedule"}
            ])
        );
        assert!(!apply(&mut pod), "a second run changes nothing");
    }

    #[test]
    fn an_existing_toleration_is_not_duplicated() {
        for covering in [
            json!([{"operator": "Exists"}]),
            json!([{"operator": "Exists", "effect": "NoSchedule"}]),
            json!([{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "vpc.amazonaws.com/efa", "operator": "Exists", "effect": "NoSchedule"}]),
        ] {
            assert!(!apply(&mut pod(&covering)), "{covering}");
        }
        for not_covering in [
            json!(null),
            json!([]),
            json!([{"operator": "Exists", "effect": "NoExecute"}]),
            json!([{"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"}]),
        ] {
            assert!(apply(&mut pod(&not_covering)), "{not_covering}");
        }
    }

    #[test]
    fn a_pod_without_accelerators_keeps_its_tolerations_absent() {
        let original =
            json!({"spec": {"containers": [{"resources": {"requests": {"cpu": "1", "example.com/foo": "1"}}}]}});
        let mut pod = original.clone();
        assert!(!apply(&mut pod));
        assert_eq!(pod, original);
    }
}
