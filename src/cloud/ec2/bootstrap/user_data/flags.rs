//! The kubelet's command-line flags, for images whose bootstrap script takes them (AL2, Windows).

use std::collections::BTreeMap;
use std::fmt::Display;

use k8s_openapi::api::core::v1::Taint;

use crate::ec2::bootstrap::user_data::input::BootParameters;

/// The flags on one line, without empty ones.
pub(crate) fn kubelet_flags(boot: &BootParameters<'_>) -> String {
    let kubelet = &boot.kubelet;
    let mut flags = vec![node_labels(&boot.labels), register_with_taints(&boot.taints)];
    flags.push(Some(format!("--max-pods={}", boot.max_pods)));
    flags.push(plain("--pods-per-core", kubelet.pods_per_core));
    flags.push(pairs("--system-reserved", kubelet.system_reserved.as_ref(), '='));
    flags.push(pairs("--kube-reserved", kubelet.kube_reserved.as_ref(), '='));
    flags.push(pairs("--eviction-hard", kubelet.eviction_hard.as_ref(), '<'));
    flags.push(pairs("--eviction-soft", kubelet.eviction_soft.as_ref(), '<'));
    flags.push(pairs("--eviction-soft-grace-period", kubelet.eviction_soft_grace_period.as_ref(), '='));
    flags.push(plain("--eviction-max-pod-grace-period", kubelet.eviction_max_pod_grace_period));
    flags.push(plain("--image-gc-high-threshold", kubelet.image_gc_high_threshold_percent));
    flags.push(plain("--image-gc-low-threshold", kubelet.image_gc_low_threshold_percent));
    flags.push(plain("--cpu-cfs-quota", kubelet.cpu_cfs_quota));
    flags.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// `--node-labels`, by key.
pub(crate) fn node_labels(labels: &BTreeMap<String, String>) -> Option<String> {
    pairs("--node-labels", Some(labels), '=')
}

fn register_with_taints(taints: &[Taint]) -> Option<String> {
    let text = |taint: &Taint| match taint.value.as_deref() {
        None | Some("") => format!("{}:{}", taint.key, taint.effect),
        Some(value) => format!("{}={value}:{}", taint.key, taint.effect),
    };
    list("--register-with-taints", taints.iter().map(text).collect())
}

fn plain(flag: &str, value: Option<impl Display>) -> Option<String> {
    value.map(|value| format!("{flag}={value}"))
}

fn pairs(flag: &str, map: Option<&BTreeMap<String, impl Display>>, between: char) -> Option<String> {
    list(flag, map?.iter().map(|(key, value)| format!("{key}{between}{value}")).collect())
}

fn list(flag: &str, items: Vec<String>) -> Option<String> {
    if items.is_empty() {
        return None;
    }
    let text = items.join(",").replace('\\', "\\\\").replace('"', "\\\"");
    Some(format!("{flag}=\"{text}\""))
}
