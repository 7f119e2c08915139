//! What a LimitRange gives to containers that leave a request open.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, LimitRange, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::resources::Resources;

/// The default requests of the LimitRanges of a namespace, by resource name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DefaultRequests(BTreeMap<String, Quantity>);

impl DefaultRequests {
    /// The defaults of one LimitRange: of type Container, `defaultRequest`, else `default`, else `max`, else `min`, as the API server
    /// completes a LimitRange (`SetDefaults_LimitRangeItem`).
    pub fn of(limit_range: &LimitRange) -> Self {
        let mut out = Self::default();
        let items = limit_range.spec.iter().flat_map(|spec| &spec.limits).filter(|item| item.type_ == "Container");
        for item in items {
            let mut of_item = BTreeMap::new();
            for source in [&item.default_request, &item.default, &item.max, &item.min] {
                for (resource, quantity) in source.iter().flatten() {
                    of_item.entry(resource.clone()).or_insert_with(|| quantity.clone());
                }
            }
            out.raise_to(&Self(of_item));
        }
        out
    }

    /// Raises each default to that of `other`. Which one of several LimitRanges comes first at admission is not defined.
    pub fn raise_to(&mut self, other: &Self) {
        let parsed = |resource: &String, quantity: &Quantity| {
            let map = BTreeMap::from([(resource.clone(), quantity.clone())]);
            Resources::from_map(&map).map(|parsed| parsed.get(resource)).unwrap_or_default()
        };
        for (resource, quantity) in &other.0 {
            let known = self.0.entry(resource.clone()).or_insert_with(|| quantity.clone());
            if parsed(resource, quantity) > parsed(resource, known) {
                *known = quantity.clone();
            }
        }
    }

    /// Gives the defaults to the containers and init containers that have neither a request nor a limit of a resource. A limit becomes the
    /// request before a LimitRange is applied.
    pub fn apply_to(&self, spec: &mut PodSpec) {
        if !self.0.is_empty() {
            spec.containers
                .iter_mut()
                .chain(spec.init_containers.iter_mut().flatten())
                .for_each(|one| self.complete(one));
        }
    }

    fn complete(&self, container: &mut Container) {
        let resources = container.resources.get_or_insert_default();
        for (resource, quantity) in &self.0 {
            let is_limited = resources.limits.as_ref().is_some_and(|limits| limits.contains_key(resource));
            if !is_limited {
                let requests = resources.requests.get_or_insert_default();
                requests.entry(resource.clone()).or_insert_with(|| quantity.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn defaults(limits: &Value) -> DefaultRequests {
        DefaultRequests::of(&serde_json::from_value(json!({"spec": {"limits": limits}})).unwrap())
    }

    fn requests(defaults: &DefaultRequests, resources: &Value) -> Value {
        let container = json!({"name": "c", "resources": resources});
        let mut spec: PodSpec =
            serde_json::from_value(json!({"containers": [container], "initContainers": [container]})).unwrap();
        defaults.apply_to(&mut spec);
        let init = spec.init_containers.unwrap().remove(0).resources;
        let main = spec.containers.remove(0).resources;
        assert_eq!(init, main);
        json!(main.unwrap_or_default().requests)
    }

    #[test]
    fn a_container_gets_what_it_leaves_open() {
        let range = defaults(&json!([
            {"type": "Pod", "max": {"cpu": "9"}},
            {"type": "Container", "defaultRequest": {"cpu": "1"}, "default": {"cpu": "2", "memory": "1Gi"}, "min": {"cpu": "10m"}},
        ]));
        for (resources, expected) in [
            (json!({}), json!({"cpu": "1", "memory": "1Gi"})),
            (json!({"requests": {"cpu": "5m"}}), json!({"cpu": "5m", "memory": "1Gi"})),
            (json!({"limits": {"cpu": "3"}}), json!({"memory": "1Gi"})),
        ] {
            assert_eq!(requests(&range, &resources), expected, "{resources}");
        }
        assert_eq!(requests(&DefaultRequests::default(), &json!({})), Value::Null);
        assert_eq!(
            requests(&defaults(&json!([{"type": "Container", "max": {"cpu": "4"}}])), &json!({})),
            json!({"cpu": "4"})
        );
        assert_eq!(
            requests(&defaults(&json!([{"type": "Container", "min": {"cpu": "4"}}])), &json!({})),
            json!({"cpu": "4"})
        );
    }

    #[test]
    fn of_several_limit_ranges_the_larger_default_counts() {
        let range = |cpu: &str| defaults(&json!([{"type": "Container", "defaultRequest": {"cpu": cpu}}]));
        for (a, b) in [("500m", "1"), ("1", "500m")] {
            let mut both = range(a);
            both.raise_to(&range(b));
            assert_eq!(both, range("1"));
        }
    }
}
