//! Accelerators among extended resources, and the requests of pods for them.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::webhook::raw_pod::{CONTAINERS, list};

/// Whether an extended resource is a device whose nodes are commonly tainted with its name.
pub(crate) fn is_accelerator(resource: &str) -> bool {
    const EXACT: [&str; 5] =
        ["nvidia.com/gpu", "nvidia.com/gpu.shared", "amd.com/gpu", "habana.ai/gaudi", "vpc.amazonaws.com/efa"];
    EXACT.contains(&resource)
        || resource.starts_with("nvidia.com/mig-")
        || resource.starts_with("aws.amazon.com/neuron")
}

/// Whether a quantity is zero: no digit but zeros before the exponent.
pub(crate) fn is_zero(quantity: &Value) -> bool {
    match quantity {
        Value::String(text) => {
            let number = text.split(['e', 'E']).next().unwrap_or_default();
            !number.bytes().any(|byte| matches!(byte, b'1'..=b'9'))
        }
        Value::Number(number) => number.as_f64() == Some(0.0),
        _ => true,
    }
}

/// Accelerators among the amounts of one container's `requests` or `limits`.
pub(crate) fn accelerators(amounts: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    amounts.iter().filter(|(resource, quantity)| is_accelerator(resource) && !is_zero(quantity))
}

/// Accelerators that any container of the pod requests or is limited to, sorted.
pub(crate) fn requested(pod: &Value) -> BTreeSet<String> {
    let Some(spec) = pod.get("spec") else {
        return BTreeSet::new();
    };
    CONTAINERS
        .into_iter()
        .flat_map(|member| list(spec, member))
        .flat_map(|container| {
            ["/resources/requests", "/resources/limits"]
                .into_iter()
                .filter_map(|pointer| container.pointer(pointer).and_then(Value::as_object))
        })
        .flat_map(accelerators)
        .map(|(resource, _)| resource.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_devices_are_accelerators() {
        for resource in
            ["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "aws.amazon.com/neuron", "aws.amazon.com/neuroncore"]
        {
            assert!(is_accelerator(resource), "{resource}");
        }
        for resource in
            ["cpu", "memory", "hugepages-2Mi", "example.com/gpu", "smarter-devices/fuse", "nvidia.com/driver"]
        {
            assert!(!is_accelerator(resource), "{resource}");
        }
    }

    #[test]
    fn zero_in_any_notation_is_no_request() {
        for quantity in [json!("0"), json!("0m"), json!("0.0"), json!("0e3"), json!(0), json!(""), json!(null)] {
            assert!(is_zero(&quantity), "{quantity}");
        }
        for quantity in [json!("1"), json!("0.5"), json!("10"), json!(2), json!("1k")] {
            assert!(!is_zero(&quantity), "{quantity}");
        }
    }
}
