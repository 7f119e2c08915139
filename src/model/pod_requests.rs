//! Resource requests of pods, computed as kube-scheduler and the kubelet do.

use k8s_openapi::api::core::v1::{Container, PodSpec, PodStatus, ResourceRequirements};

use crate::resources::{ResourceError, Resources};

impl Resources {
    /// Requests of a running pod: as [`Resources::of_pod`], but while containers are resized in place, the larger of the requested and the
    /// allocated resources.
    ///
    /// # Errors
    /// As [`Resources::of_pod`].
    pub fn of_running_pod(spec: &PodSpec, status: Option<&PodStatus>) -> Result<Self, ResourceError> {
        let statuses =
            status.iter().flat_map(|s| [&s.container_statuses, &s.init_container_statuses]).flatten().flatten();
        let mut resized: Option<PodSpec> = None;
        for status in statuses {
            let actual = status.resources.as_ref().and_then(|resources| resources.requests.as_ref());
            for have in [actual, status.allocated_resources.as_ref()].into_iter().flatten() {
                let of = |spec: &PodSpec| {
                    let mut containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
                    containers.find(|container| container.name == status.name).and_then(|c| c.resources.clone())
                };
                let Some(asked) = of(resized.as_ref().unwrap_or(spec)) else { continue };
                if asked.requests.as_ref() == Some(have) {
                    continue;
                }
                let mut larger = requirements(&asked)?;
                larger.raise_to(&Self::from_map(have)?);
                let spec = resized.get_or_insert_with(|| spec.clone());
                let mut containers = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
                if let Some(container) = containers.find(|container| container.name == status.name) {
                    let requests = Some(larger.to_map());
                    container.resources = Some(ResourceRequirements { requests, ..asked });
                }
            }
        }
        Self::of_pod(resized.as_ref().unwrap_or(spec))
    }

    /// Requests of a pod, one pod slot included: the larger of (containers + sidecars) and the peak of the init
    /// containers with the sidecars started before them; pod-level resources override; overhead is added.
    /// A container's limit replaces an absent request, as the API server defaults it.
    ///
    /// # Errors
    /// A quantity is malformed or negative.
    pub fn of_pod(spec: &PodSpec) -> Result<Self, ResourceError> {
        let mut running = Self::of_containers(spec, requirements)?;
        if let Some(pod_level) = &spec.resources {
            let declared = requirements(pod_level)?;
            let requested = |name: &str| pod_level.requests.as_ref().is_some_and(|map| map.contains_key(name));
            for name in declared_names(pod_level) {
                let supported = name == "cpu" || name == "memory" || name.starts_with("hugepages-");
                // As the API server defaults it: a limit replaces the request only where no container requests the resource.
                if supported && (requested(name) || running.get(name) == 0) {
                    running.set(name, declared.get(name));
                }
            }
        }
        if let Some(overhead) = &spec.overhead {
            running.add(&Self::from_map(overhead)?);
        }
        running.pods = 1;
        Ok(running)
    }

    /// Limits of a pod: of its containers and init containers as in [`Resources::of_pod`], but of its own where it has them.
    ///
    /// # Errors
    /// A quantity is malformed or negative.
    pub fn limits_of_pod(spec: &PodSpec) -> Result<Self, ResourceError> {
        let limits = |resources: &ResourceRequirements| {
            resources.limits.as_ref().map_or_else(|| Ok(Self::default()), Self::from_map)
        };
        let mut out = Self::of_containers(spec, limits)?;
        if let Some(own) = &spec.resources {
            let declared = limits(own)?;
            own.limits.iter().flat_map(|map| map.keys()).for_each(|name| out.set(name, declared.get(name)));
        }
        Ok(out)
    }

    /// The larger of (containers + sidecars) and the peak of the init containers with the sidecars started before them.
    fn of_containers(
        spec: &PodSpec,
        of: impl Fn(&ResourceRequirements) -> Result<Self, ResourceError>,
    ) -> Result<Self, ResourceError> {
        let of = |container: &Container| container.resources.as_ref().map_or_else(|| Ok(Self::default()), &of);
        let mut running = Self::default();
        for container in &spec.containers {
            running.add(&of(container)?);
        }
        let mut sidecars = Self::default();
        let mut peak = Self::default();
        for container in spec.init_containers.as_deref().unwrap_or_default() {
            let requests = of(container)?;
            if container.restart_policy.as_deref() == Some("Always") {
                sidecars.add(&requests);
                peak.raise_to(&sidecars);
            } else {
                let mut during = sidecars.clone();
                during.add(&requests);
                peak.raise_to(&during);
            }
        }
        running.add(&sidecars);
        running.raise_to(&peak);
        Ok(running)
    }
}

fn requirements(resources: &ResourceRequirements) -> Result<Resources, ResourceError> {
    let mut out = Resources::default();
    if let Some(limits) = &resources.limits {
        out = Resources::from_map(limits)?;
    }
    if let Some(requests) = &resources.requests {
        let requests_read = Resources::from_map(requests)?;
        for name in requests.keys() {
            out.set(name, requests_read.get(name));
        }
    }
    Ok(out)
}

fn declared_names(resources: &ResourceRequirements) -> impl Iterator<Item = &str> {
    resources.limits.iter().chain(&resources.requests).flat_map(|map| map.keys().map(String::as_str))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn limits_are_those_of_the_containers_unless_the_pod_has_its_own() {
        let limited =
            |cpu: &str, memory: &str| json!({"limits": {"cpu": cpu, "memory": memory}, "requests": {"cpu": "10m"}});
        let container = |resources: &Value| json!({"name": "c", "resources": resources});
        let sidecar = json!({"name": "s", "restartPolicy": "Always", "resources": limited("500m", "1Gi")});
        let init = container(&limited("3", "1Gi"));
        let two = [container(&limited("1", "1Gi")), container(&limited("1", "2Gi"))];
        let unlimited = container(&json!({"requests": {"cpu": "4"}}));
        for (case, spec, cpu, gib) in [
            ("two containers", json!({"containers": two}), 2_000, 3),
            ("one has none", json!({"containers": [two[0], unlimited]}), 1_000, 1),
            ("with a sidecar", json!({"containers": two, "initContainers": [sidecar]}), 2_500, 4),
            ("an init container after it", json!({"containers": two, "initContainers": [sidecar, init]}), 3_500, 4),
            ("of the pod", json!({"containers": two, "resources": {"limits": {"cpu": "5"}}}), 5_000, 3),
            ("overhead is no limit", json!({"containers": two, "overhead": {"cpu": "1"}}), 2_000, 3),
            ("none", json!({"containers": [unlimited]}), 0, 0),
        ] {
            let limits = Resources::limits_of_pod(&serde_json::from_value(spec).unwrap()).unwrap();
            assert_eq!((limits.cpu.0, limits.memory.0 >> 30, limits.pods), (cpu, gib, 0), "{case}");
        }
    }

    fn requests_of(spec: Value) -> Resources {
        Resources::of_pod(&serde_json::from_value(spec).unwrap()).unwrap()
    }

    #[test]
    fn pod_requests_follow_the_kubelet() {
        for (name, spec, cpu, memory, gpu) in [
            (
                "b11 an init container larger than the sum determines the requests",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}],
                       "initContainers": [{"name": "i", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}]}),
                3000,
                1 << 30,
                0,
            ),
            (
                "b12 a sidecar is added",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}],
                       "initContainers": [
                         {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
                         {"name": "i", "resources": {"requests": {"cpu": "700m"}}}]}),
                1500,
                0,
                0,
            ),
            (
                "an init container after a sidecar runs concurrently with it",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}],
                       "initContainers": [
                         {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
                         {"name": "i", "resources": {"requests": {"cpu": "2"}}}]}),
                2500,
                0,
                0,
            ),
            (
                "b13 pod overhead is added",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}],
                       "overhead": {"cpu": "250m", "memory": "120Mi"}}),
                1250,
                120 << 20,
                0,
            ),
            (
                "b14 a limit replaces an absent request",
                json!({"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]}),
                0,
                0,
                2,
            ),
            (
                "pod-level resources override the sum",
                json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
                       "resources": {"requests": {"cpu": "2"}}}),
                2000,
                1 << 30,
                0,
            ),
            ("b16 a pod without requests still takes a slot", json!({"containers": [{"name": "a"}]}), 0, 0, 0),
        ] {
            let got = requests_of(spec);
            assert_eq!((got.cpu.0, got.memory.0, got.get("nvidia.com/gpu")), (cpu, memory, gpu), "{name}");
            assert_eq!(got.pods, 1, "{name}");
        }
    }

    #[test]
    fn a_pod_that_is_resized_takes_the_larger_of_both() {
        let spec = json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1", "memory": "2Gi"}}},
            {"name": "b", "resources": {"requests": {"cpu": "1"}}}]});
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        for (status, cpu, memory) in [
            (json!({}), 2000, 2),
            (
                json!({"containerStatuses": [{"name": "a", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}]}),
                4000,
                2,
            ),
            (
                json!({"containerStatuses": [{"name": "b", "allocatedResources": {"cpu": "2", "memory": "1Gi"}}]}),
                3000,
                3,
            ),
            (json!({"containerStatuses": [{"name": "gone", "allocatedResources": {"cpu": "9"}}]}), 2000, 2),
        ] {
            let mut status = status;
            for entry in status["containerStatuses"].as_array_mut().into_iter().flatten() {
                for (key, value) in
                    [("image", json!("i")), ("imageID", json!("i")), ("ready", json!(true)), ("restartCount", json!(0))]
                {
                    entry[key] = value;
                }
            }
            let status: PodStatus = serde_json::from_value(status).unwrap();
            let got = Resources::of_running_pod(&spec, Some(&status)).unwrap();
            assert_eq!((got.cpu.0, got.memory.0 >> 30), (cpu, memory), "{status:?}");
        }
    }
}
