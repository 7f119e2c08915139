//! `n22`: copies accelerator limits to absent requests. The API server defaults requests the same way when it decodes a pod, but limits
//! that another webhook injects have no requests, and the planner counts requests.

use serde_json::{Map, Value};

use crate::webhook::accelerator::accelerators;
use crate::webhook::raw_pod::{CONTAINERS, list_mut, object_mut};
use crate::webhook::rule::Rule;

pub(crate) const RULE: Rule = Rule {
    id: "n22",
    summary: "Accelerator limits are copied to requests where a container has none.",
    apply,
    warnings: Rule::warns_of_nothing,
};

fn apply(pod: &mut Value) -> bool {
    let Some(spec) = pod.get_mut("spec") else { return false };
    let mut changed = false;
    for member in CONTAINERS {
        for container in list_mut(spec, member) {
            let Some(resources) = container.get_mut("resources") else {
                continue;
            };
            let Some(limits) = resources.get("limits").and_then(Value::as_object) else {
                continue;
            };
            let requests = resources.get("requests");
            if requests.is_some_and(|requests| !requests.is_null() && !requests.is_object()) {
                continue;
            }
            let missing: Map<String, Value> = accelerators(limits)
                .filter(|(resource, _)| requests.is_none_or(|requests| requests.get(resource.as_str()).is_none()))
                .map(|(resource, quantity)| (resource.clone(), quantity.clone()))
                .collect();
            if missing.is_empty() {
                continue;
            }
            if let Some(requests) = object_mut(resources, "requests") {
                requests.extend(missing);
                changed = true;
            }
        }
    }
    changed
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn limits_fill_only_absent_requests_of_every_container() {
        for (resources, expected) in [
            (
                json!({"limits": {"nvidia.com/gpu": "1", "cpu": "2"}}),
                json!({"limits": {"nvidia.com/gpu": "1", "cpu": "2"}, "requests": {"nvidia.com/gpu": "1"}}),
            ),
            (
                json!({"limits": {"nvidia.com/gpu": 2}, "requests": null}),
                json!({"limits": {"nvidia.com/gpu": 2}, "requests": {"nvidia.com/gpu": 2}}),
            ),
            (
                json!({"limits": {"amd.com/gpu": "1"}, "requests": {"cpu": "1"}}),
                json!({"limits": {"amd.com/gpu": "1"}, "requests": {"amd.com/gpu": "1", "cpu": "1"}}),
            ),
            (
                json!({"limits": {"amd.com/gpu": "1"}, "requests": {"amd.com/gpu": "1"}}),
                json!({"limits": {"amd.com/gpu": "1"}, "requests": {"amd.com/gpu": "1"}}),
            ),
            (json!({"limits": {"nvidia.com/gpu": "0"}}), json!({"limits": {"nvidia.com/gpu": "0"}})),
            (json!({"limits": {"cpu": "1"}}), json!({"limits": {"cpu": "1"}})),
            (
                json!({"limits": {"amd.com/gpu": "1"}, "requests": []}),
                json!({"limits": {"amd.com/gpu": "1"}, "requests": []}),
            ),
            (json!({}), json!({})),
        ] {
            for member in CONTAINERS {
                let original = json!({"spec": {member: [{"name": "c", "resources": resources}]}});
                let mut pod = original.clone();
                let changed = apply(&mut pod);
                assert_eq!(pod, json!({"spec": {member: [{"name": "c", "resources": expected}]}}));
                assert_eq!(changed, pod != original);
            }
        }
    }
}
