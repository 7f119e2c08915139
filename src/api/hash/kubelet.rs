//! The kubelet configuration of an EC2NodeClass in its drift hash.

use serde_json::{Map, Value};

use crate::go_duration::GoDuration;
use crate::hash::go::{Struct, boolean, duration, int32, map, set, string, strings, text};

/// Members of the struct `KubeletConfiguration` of Karpenter 1.14: name in JSON, name in Go, hash of the value.
type Member = (&'static str, &'static str, fn(&Value) -> Option<u64>);
const V5: [Member; 12] = [
    ("clusterDNS", "ClusterDNS", |value| set(value, string)),
    ("maxPods", "MaxPods", int32),
    ("podsPerCore", "PodsPerCore", int32),
    ("systemReserved", "SystemReserved", strings),
    ("kubeReserved", "KubeReserved", strings),
    ("evictionHard", "EvictionHard", strings),
    ("evictionSoft", "EvictionSoft", strings),
    ("evictionSoftGracePeriod", "EvictionSoftGracePeriod", durations),
    ("evictionMaxPodGracePeriod", "EvictionMaxPodGracePeriod", int32),
    ("imageGCHighThresholdPercent", "ImageGCHighThresholdPercent", int32),
    ("imageGCLowThresholdPercent", "ImageGCLowThresholdPercent", int32),
    ("cpuCFSQuota", "CPUCFSQuota", boolean),
];

/// The struct as Karpenter 1.14 hashes it, and the hash of what that release cannot decode: zero if it can decode everything.
pub(crate) fn v5(kubelet: &Value) -> (Option<u64>, u64) {
    let Some(members) = kubelet.as_object() else { return (None, 0) };
    let mut unknown = members.clone();
    unknown.retain(|_, value| !value.is_null());
    let mut known = Struct::new("KubeletConfiguration");
    for (name, field, hash) in V5 {
        let hash = members.get(name).and_then(hash);
        if hash.is_some() {
            unknown.remove(name);
        }
        known = known.field(field, hash);
    }
    let beyond = if unknown.is_empty() { 0 } else { text(&json(&Value::Object(unknown))) };
    (Some(known.finish()), beyond)
}

/// A map of `metav1.Duration`.
fn durations(value: &Value) -> Option<u64> {
    map(value, |value| Some(duration(value.as_str()?.parse::<GoDuration>().ok()?.nanoseconds())))
}

/// The kubelet configuration as Go's JSON encoder writes it: compact, keys sorted, `null` when absent.
pub(crate) fn json(kubelet: &Value) -> String {
    let Some(members) = kubelet.as_object().filter(|members| !members.is_empty()) else {
        return "null".into();
    };
    let mut json = String::new();
    write_sorted(&mut json, members);
    // Go's JSON encoder escapes the characters that are special in HTML.
    for (raw, escaped) in
        [("<", r"\u003c"), (">", r"\u003e"), ("&", r"\u0026"), ("\u{2028}", r"\u2028"), ("\u{2029}", r"\u2029")]
    {
        json = json.replace(raw, escaped);
    }
    json
}

fn write_sorted(out: &mut String, members: &Map<String, Value>) {
    let mut sorted: Vec<_> = members.iter().collect();
    sorted.sort_by_key(|(key, _)| key.as_str());
    out.push('{');
    for (index, (key, value)) in sorted.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str(&Value::from(key.as_str()).to_string());
        out.push(':');
        write_value(out, value);
    }
    out.push('}');
}

fn write_value(out: &mut String, value: &Value) {
    match value {
        Value::Object(members) => write_sorted(out, members),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_value(out, item);
            }
            out.push(']');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}
