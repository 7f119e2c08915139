//! The schema of `KubeletConfiguration` (`kubelet.config.k8s.io/v1beta1`) of Kubernetes 1.36: names and types of its members. The API
//! server does not check it, since the class's map is open, and a kubelet with an unknown member does not start.

use std::fmt;

use serde_json::Value;
use stowage_api::go_duration::GoDuration;
use stowage_api::validation::is_quantity;

/// The type of a member. `null` counts as absent, except in a duration.
#[derive(Debug)]
enum Shape {
    Bool,
    Int32,
    Int64,
    Uint32,
    Number,
    Text,
    /// A string with a duration.
    Duration,
    /// A duration, or an integer number of nanoseconds.
    DurationOrNanoseconds,
    Quantity,
    List(&'static Shape),
    Map(&'static Shape),
    Object(Members),
}

type Members = &'static [(&'static str, Shape)];

const TEXTS: Shape = Shape::List(&Shape::Text);
const TEXT_BY_NAME: Shape = Shape::Map(&Shape::Text);

const AUTHENTICATION: Members = &[
    ("anonymous", Shape::Object(&[("enabled", Shape::Bool)])),
    ("webhook", Shape::Object(&[("cacheTTL", Shape::Duration), ("enabled", Shape::Bool)])),
    ("x509", Shape::Object(&[("clientCAFile", Shape::Text)])),
];

const AUTHORIZATION: Members = &[
    ("mode", Shape::Text),
    ("webhook", Shape::Object(&[("cacheAuthorizedTTL", Shape::Duration), ("cacheUnauthorizedTTL", Shape::Duration)])),
];

const LOG_OUTPUT: Members = &[("infoBufferSize", Shape::Quantity), ("splitStream", Shape::Bool)];

const LOGGING: Members = &[
    ("flushFrequency", Shape::DurationOrNanoseconds),
    ("format", Shape::Text),
    ("options", Shape::Object(&[("json", Shape::Object(LOG_OUTPUT)), ("text", Shape::Object(LOG_OUTPUT))])),
    ("verbosity", Shape::Uint32),
    ("vmodule", Shape::List(&Shape::Object(&[("filePattern", Shape::Text), ("verbosity", Shape::Uint32)]))),
];

const TAINT: Members =
    &[("effect", Shape::Text), ("key", Shape::Text), ("timeAdded", Shape::Text), ("value", Shape::Text)];

/// Members of the configuration, sorted by name.
const KUBELET: Members = &[
    ("address", Shape::Text),
    ("allowedUnsafeSysctls", TEXTS),
    ("apiVersion", Shape::Text),
    ("authentication", Shape::Object(AUTHENTICATION)),
    ("authorization", Shape::Object(AUTHORIZATION)),
    ("cgroupDriver", Shape::Text),
    ("cgroupRoot", Shape::Text),
    ("cgroupsPerQOS", Shape::Bool),
    ("clusterDNS", TEXTS),
    ("clusterDomain", Shape::Text),
    ("configMapAndSecretChangeDetectionStrategy", Shape::Text),
    ("containerLogMaxFiles", Shape::Int32),
    ("containerLogMaxSize", Shape::Text),
    ("containerLogMaxWorkers", Shape::Int32),
    ("containerLogMonitorInterval", Shape::Duration),
    ("containerRuntimeEndpoint", Shape::Text),
    ("contentType", Shape::Text),
    ("cpuCFSQuota", Shape::Bool),
    ("cpuCFSQuotaPeriod", Shape::Duration),
    ("cpuManagerPolicy", Shape::Text),
    ("cpuManagerPolicyOptions", TEXT_BY_NAME),
    ("cpuManagerReconcilePeriod", Shape::Duration),
    ("crashLoopBackOff", Shape::Object(&[("maxContainerRestartPeriod", Shape::Duration)])),
    ("enableContentionProfiling", Shape::Bool),
    ("enableControllerAttachDetach", Shape::Bool),
    ("enableDebugFlagsHandler", Shape::Bool),
    ("enableDebuggingHandlers", Shape::Bool),
    ("enableProfilingHandler", Shape::Bool),
    ("enableServer", Shape::Bool),
    ("enableSystemLogHandler", Shape::Bool),
    ("enableSystemLogQuery", Shape::Bool),
    ("enforceNodeAllocatable", TEXTS),
    ("eventBurst", Shape::Int32),
    ("eventRecordQPS", Shape::Int32),
    ("evictionHard", TEXT_BY_NAME),
    ("evictionMaxPodGracePeriod", Shape::Int32),
    ("evictionMinimumReclaim", TEXT_BY_NAME),
    ("evictionPressureTransitionPeriod", Shape::Duration),
    ("evictionSoft", TEXT_BY_NAME),
    ("evictionSoftGracePeriod", TEXT_BY_NAME),
    ("failCgroupV1", Shape::Bool),
    ("failSwapOn", Shape::Bool),
    ("featureGates", Shape::Map(&Shape::Bool)),
    ("fileCheckFrequency", Shape::Duration),
    ("hairpinMode", Shape::Text),
    ("healthzBindAddress", Shape::Text),
    ("healthzPort", Shape::Int32),
    ("httpCheckFrequency", Shape::Duration),
    ("imageGCHighThresholdPercent", Shape::Int32),
    ("imageGCLowThresholdPercent", Shape::Int32),
    ("imageMaximumGCAge", Shape::Duration),
    ("imageMinimumGCAge", Shape::Duration),
    ("imagePullCredentialsVerificationPolicy", Shape::Text),
    ("imageServiceEndpoint", Shape::Text),
    ("iptablesDropBit", Shape::Int32),
    ("iptablesMasqueradeBit", Shape::Int32),
    ("kernelMemcgNotification", Shape::Bool),
    ("kind", Shape::Text),
    ("kubeAPIBurst", Shape::Int32),
    ("kubeAPIQPS", Shape::Int32),
    ("kubeReserved", TEXT_BY_NAME),
    ("kubeReservedCgroup", Shape::Text),
    ("kubeletCgroups", Shape::Text),
    ("localStorageCapacityIsolation", Shape::Bool),
    ("logging", Shape::Object(LOGGING)),
    ("makeIPTablesUtilChains", Shape::Bool),
    ("maxOpenFiles", Shape::Int64),
    ("maxParallelImagePulls", Shape::Int32),
    ("maxPods", Shape::Int32),
    ("memoryManagerPolicy", Shape::Text),
    ("memoryReservationPolicy", Shape::Text),
    ("memorySwap", Shape::Object(&[("swapBehavior", Shape::Text)])),
    ("memoryThrottlingFactor", Shape::Number),
    ("mergeDefaultEvictionSettings", Shape::Bool),
    ("nodeLeaseDurationSeconds", Shape::Int32),
    ("nodeStatusMaxImages", Shape::Int32),
    ("nodeStatusReportFrequency", Shape::Duration),
    ("nodeStatusUpdateFrequency", Shape::Duration),
    ("oomScoreAdj", Shape::Int32),
    ("podCIDR", Shape::Text),
    ("podLogsDir", Shape::Text),
    ("podPidsLimit", Shape::Int64),
    ("podsPerCore", Shape::Int32),
    ("port", Shape::Int32),
    ("preloadedImagesVerificationAllowlist", TEXTS),
    ("protectKernelDefaults", Shape::Bool),
    ("providerID", Shape::Text),
    ("qosReserved", TEXT_BY_NAME),
    ("readOnlyPort", Shape::Int32),
    ("registerNode", Shape::Bool),
    ("registerWithTaints", Shape::List(&Shape::Object(TAINT))),
    ("registryBurst", Shape::Int32),
    ("registryPullQPS", Shape::Int32),
    (
        "reservedMemory",
        Shape::List(&Shape::Object(&[("limits", Shape::Map(&Shape::Quantity)), ("numaNode", Shape::Int32)])),
    ),
    ("reservedSystemCPUs", Shape::Text),
    ("resolvConf", Shape::Text),
    ("rotateCertificates", Shape::Bool),
    ("runOnce", Shape::Bool),
    ("runtimeRequestTimeout", Shape::Duration),
    ("seccompDefault", Shape::Bool),
    ("serializeImagePulls", Shape::Bool),
    ("serverTLSBootstrap", Shape::Bool),
    ("showHiddenMetricsForVersion", Shape::Text),
    ("shutdownGracePeriod", Shape::Duration),
    (
        "shutdownGracePeriodByPodPriority",
        Shape::List(&Shape::Object(&[("priority", Shape::Int32), ("shutdownGracePeriodSeconds", Shape::Int64)])),
    ),
    ("shutdownGracePeriodCriticalPods", Shape::Duration),
    ("singleProcessOOMKill", Shape::Bool),
    ("staticPodPath", Shape::Text),
    ("staticPodURL", Shape::Text),
    ("staticPodURLHeader", Shape::Map(&TEXTS)),
    ("streamingConnectionIdleTimeout", Shape::Duration),
    ("syncFrequency", Shape::Duration),
    ("systemCgroups", Shape::Text),
    ("systemReserved", TEXT_BY_NAME),
    ("systemReservedCgroup", Shape::Text),
    ("tlsCertFile", Shape::Text),
    ("tlsCipherSuites", TEXTS),
    ("tlsCurvePreferences", Shape::List(&Shape::Int32)),
    ("tlsMinVersion", Shape::Text),
    ("tlsPrivateKeyFile", Shape::Text),
    ("topologyManagerPolicy", Shape::Text),
    ("topologyManagerPolicyOptions", TEXT_BY_NAME),
    ("topologyManagerScope", Shape::Text),
    ("tracing", Shape::Object(&[("endpoint", Shape::Text), ("samplingRatePerMillion", Shape::Int32)])),
    ("userNamespaces", Shape::Object(&[("idsPerPod", Shape::Int64)])),
    ("volumePluginDir", Shape::Text),
    ("volumeStatsAggPeriod", Shape::Duration),
];

/// Appends the type errors of a member of the configuration and of its children.
pub(crate) fn check_member(name: &str, value: &Value, problems: &mut Vec<String>) {
    check_in(KUBELET, "spec.kubelet", name, value, problems);
}

fn check_in(members: Members, at: &str, name: &str, value: &Value, problems: &mut Vec<String>) {
    match members.iter().find(|(known, _)| *known == name) {
        Some((_, shape)) => check(shape, &format!("{at}.{name}"), value, problems),
        None => problems.push(format!("{at}.{name}: not a member of the kubelet's configuration; check its spelling")),
    }
}

fn check(shape: &Shape, at: &str, value: &Value, problems: &mut Vec<String>) {
    if value.is_null() && !matches!(shape, Shape::Duration) {
        return;
    }
    match (shape, value) {
        (Shape::List(item), Value::Array(values)) => {
            for (index, value) in values.iter().enumerate() {
                check(item, &format!("{at}[{index}]"), value, problems);
            }
        }
        (Shape::Map(item), Value::Object(values)) => {
            for (name, value) in values {
                check(item, &format!("{at}[{name}]"), value, problems);
            }
        }
        (Shape::Object(members), Value::Object(values)) => {
            for (name, value) in values {
                check_in(members, at, name, value, problems);
            }
        }
        _ if shape.holds(value) => {}
        _ => problems.push(format!("{at}: expected {shape}, found {}", kind(value))),
    }
}

impl Shape {
    /// Whether a scalar value has this type; [`check`] checks lists, maps and objects.
    fn holds(&self, value: &Value) -> bool {
        match self {
            Self::Bool => value.is_boolean(),
            Self::Int32 => value.as_i64().is_some_and(|number| i32::try_from(number).is_ok()),
            Self::Int64 => value.is_i64(),
            Self::Uint32 => value.as_u64().is_some_and(|number| u32::try_from(number).is_ok()),
            Self::Number => value.is_number(),
            Self::Text => value.is_string(),
            Self::Duration => is_duration(value),
            Self::DurationOrNanoseconds => value.is_i64() || is_duration(value),
            Self::Quantity => value.is_number() || value.as_str().is_some_and(is_quantity),
            Self::List(_) | Self::Map(_) | Self::Object(_) => false,
        }
    }
}

fn is_duration(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.parse::<GoDuration>().is_ok())
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bool => "true or false",
            Self::Int32 => "a whole number of 32 bits",
            Self::Int64 => "a whole number of 64 bits",
            Self::Uint32 => "a whole number of 32 bits, not negative",
            Self::Number => "a number",
            Self::Text => "a string",
            Self::Duration => "a duration such as 1m30s",
            Self::DurationOrNanoseconds => "a duration such as 1m30s, or nanoseconds",
            Self::Quantity => "a quantity such as 100Mi",
            Self::List(_) => "a list",
            Self::Map(_) | Self::Object(_) => "an object",
        })
    }
}

/// The type of a value, with the value where it is short.
fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("{text:?}"),
        Value::String(_) => "a long string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn members_are_sorted_and_unique() {
        assert!(KUBELET.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    #[test]
    fn each_shape_accepts_its_values_and_reports_the_path_of_others() {
        for (name, value, expected) in [
            ("failSwapOn", json!(true), ""),
            ("failSwapOn", json!("true"), "spec.kubelet.failSwapOn: expected true or false, found \"true\""),
            ("port", json!(10250), ""),
            (
                "port",
                json!(3_000_000_000_u32),
                "spec.kubelet.port: expected a whole number of 32 bits, found 3000000000",
            ),
            ("port", json!(1.5), "spec.kubelet.port: expected a whole number of 32 bits, found 1.5"),
            ("podPidsLimit", json!(3_000_000_000_u32), ""),
            ("podPidsLimit", json!([]), "spec.kubelet.podPidsLimit: expected a whole number of 64 bits, found a list"),
            ("memoryThrottlingFactor", json!(0.9), ""),
            (
                "memoryThrottlingFactor",
                json!({}),
                "spec.kubelet.memoryThrottlingFactor: expected a number, found an object",
            ),
            ("syncFrequency", json!("1m0s"), ""),
            ("syncFrequency", json!(60), "spec.kubelet.syncFrequency: expected a duration such as 1m30s, found 60"),
            ("syncFrequency", json!(null), "spec.kubelet.syncFrequency: expected a duration such as 1m30s, found null"),
            ("clusterDomain", json!(null), ""),
            ("clusterDNS", json!(["10.0.0.10"]), ""),
            ("clusterDNS", json!(["10.0.0.10", 5]), "spec.kubelet.clusterDNS[1]: expected a string, found 5"),
            ("featureGates", json!({"A": true}), ""),
            ("featureGates", json!({"A": 1}), "spec.kubelet.featureGates[A]: expected true or false, found 1"),
            ("staticPodURLHeader", json!({"X": ["a"]}), ""),
            (
                "staticPodURLHeader",
                json!({"X": "a"}),
                "spec.kubelet.staticPodURLHeader[X]: expected a list, found \"a\"",
            ),
            ("reservedMemory", json!([{"numaNode": 0, "limits": {"memory": "1Gi"}}]), ""),
            (
                "reservedMemory",
                json!([{"limits": {"memory": "lots"}}]),
                "spec.kubelet.reservedMemory[0].limits[memory]: expected a quantity such as 100Mi, found \"lots\"",
            ),
            ("logging", json!({"flushFrequency": 5_000_000_000_i64, "verbosity": 3}), ""),
            (
                "logging",
                json!({"verbosity": -1}),
                "spec.kubelet.logging.verbosity: expected a whole number of 32 bits, not negative, found -1",
            ),
            ("evictionHard", json!(["memory"]), "spec.kubelet.evictionHard: expected an object, found a list"),
            (
                "maxpods",
                json!(5),
                "spec.kubelet.maxpods: not a member of the kubelet's configuration; check its spelling",
            ),
        ] {
            let mut problems = Vec::new();
            check_member(name, &value, &mut problems);
            assert_eq!(problems.join("; "), expected, "{name}: {value}");
        }
    }
}
