//! Validation of a node class's kubelet configuration. The API server does not validate it, and a kubelet with an invalid
//! configuration never registers its node.

pub mod kubelet_schema;

use std::collections::BTreeMap;

use serde_json::Value;
use stowage_api::Ec2NodeClassSpec;
use stowage_api::go_duration::GoDuration;
use stowage_api::validation::is_quantity;
use stowage_model::events;
use stowage_model::events::DeclaredEvent;

use crate::ami_family::AmiFamily;
use crate::catalog::{NodeSettings, RawInstanceType, Trial};
use crate::ec2::options::Options;
use crate::kubelet_config::expressions::Unusable;
use crate::kubelet_config::{INTERPRETED, Kubelet, KubeletMap};

/// Why a class's kubelet configuration is invalid: reason ([`InvalidKubelet::reason`]) and message of the condition
/// ValidationSucceeded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKubelet {
    /// All members that the kubelet would reject or ignore.
    #[error("{}", .0.join("; "))]
    Invalid(Vec<String>),
    /// An expression while expressions are off, which is the default.
    #[error(
        "spec.kubelet holds an expression in {}, and expressions are off: write a number, or set AWS_FEATURE_GATES to \
         NodeClassCEL=true",
        .0.join(", ")
    )]
    ExpressionsDisabled(Vec<String>),
    /// An expression that can't be parsed.
    #[error("{0}")]
    ExpressionInvalid(Unusable),
    /// An expression for `maxPods` that fails on an instance type.
    #[error("{0}")]
    EvaluationFailed(Unusable),
    /// A setting that the class's AMI family does not support.
    #[error("{}", .0.join("; "))]
    Unsupported(Vec<String>),
}

impl InvalidKubelet {
    /// The event about the condition ValidationSucceeded, with Karpenter's reason.
    pub const fn event(&self) -> &'static DeclaredEvent {
        match self {
            Self::Invalid(_) => events::INVALID_KUBELET_CONFIGURATION,
            Self::ExpressionsDisabled(_) => events::KUBELET_EXPRESSIONS_DISABLED,
            Self::ExpressionInvalid(_) => events::KUBELET_EXPRESSION_INVALID,
            Self::EvaluationFailed(_) => events::KUBELET_EXPRESSION_EVALUATION_FAILED,
            Self::Unsupported(_) => events::UNSUPPORTED_KUBELET_CONFIGURATION,
        }
    }
}

/// How expressions are handled.
#[derive(Clone, Copy, Debug)]
pub enum Gate<'a> {
    /// They are rejected.
    Off,
    /// They are evaluated on the instance types of the region (the feature gate NodeClassCEL).
    On {
        settings: &'a NodeSettings,
        /// Instance types by name.
        types: &'a BTreeMap<String, RawInstanceType>,
    },
}

impl<'a> Gate<'a> {
    pub fn of(options: &Options, settings: &'a NodeSettings, types: &'a BTreeMap<String, RawInstanceType>) -> Self {
        if options.node_class_cel { Self::On { settings, types } } else { Self::Off }
    }
}

/// Eviction signals that the kubelet supports; it ignores others.
const EVICTION_SIGNALS: [&str; 6] = [
    "memory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "pid.available",
];
/// Resources that can be reserved; the kubelet ignores others.
const RESERVABLE: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "pid"];

/// Validates `spec.kubelet` in Karpenter's order: members that a kubelet would reject, expressions, members that the AMI family does
/// not support. Returns an expression of a reserved amount that fails on an instance type: the amount counts as not set.
///
/// # Errors
/// All problems of the first step that finds any.
pub fn validate(spec: &Ec2NodeClassSpec, gate: Gate<'_>) -> Result<Option<Unusable>, InvalidKubelet> {
    let Some(map) = spec.kubelet.as_ref().filter(|map| !map.is_empty()) else {
        return Ok(None);
    };
    let problems = problems_of(map);
    if !problems.is_empty() {
        return Err(InvalidKubelet::Invalid(problems));
    }
    let kubelet = Kubelet::parse(Some(map)).map_err(|error| InvalidKubelet::Invalid(vec![error.to_string()]))?;
    let trial = match gate {
        Gate::Off if kubelet.has_expressions() => return Err(InvalidKubelet::ExpressionsDisabled(expressions(map))),
        Gate::Off => Trial::default(),
        Gate::On { settings, types } => settings.try_on(types.values()),
    };
    if let Some(unusable) = trial.failed.clone().filter(|unusable| unusable.source.is_parse_error()) {
        return Err(InvalidKubelet::ExpressionInvalid(unusable));
    }
    let unsupported = unsupported(AmiFamily::of(spec), map, &kubelet);
    if !unsupported.is_empty() {
        return Err(InvalidKubelet::Unsupported(unsupported));
    }
    match trial.failed {
        Some(unusable) => Err(InvalidKubelet::EvaluationFailed(unusable)),
        None => Ok(trial.dropped),
    }
}

/// All members that a kubelet would reject or ignore. Expressions are accepted here.
fn problems_of(map: &KubeletMap) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, value) in map {
        if !(name == "maxPods" && value.is_string()) {
            kubelet_schema::check_member(name, value, &mut problems);
        }
    }
    if map.contains_key("registerWithTaints") {
        problems.push(
            "spec.kubelet.registerWithTaints: can't be set, it is made from the NodeClaim's taints; set them on the NodePool"
                .to_owned(),
        );
    }
    for field in ["evictionHard", "evictionSoft", "evictionMinimumReclaim"] {
        for (signal, threshold) in texts(map, field) {
            check_signal(field, signal, &mut problems);
            if let Some(problem) = threshold_problem(threshold) {
                problems.push(format!("spec.kubelet.{field}[{signal}]: {threshold:?} {problem}"));
            }
        }
    }
    check_grace_periods(map, &mut problems);
    for field in ["kubeReserved", "systemReserved"] {
        for (resource, amount) in texts(map, field) {
            if !RESERVABLE.contains(&resource) {
                problems.push(format!(
                    "spec.kubelet.{field}: {resource:?} can't be reserved, only {}",
                    RESERVABLE.join(", ")
                ));
            }
            if amount.starts_with('-') {
                problems.push(format!("spec.kubelet.{field}[{resource}]: {amount:?} is negative"));
            }
        }
    }
    check_numbers(map, &mut problems);
    problems
}

fn check_signal(field: &str, signal: &str, problems: &mut Vec<String>) {
    if !EVICTION_SIGNALS.contains(&signal) {
        problems.push(format!(
            "spec.kubelet.{field}: {signal:?} is not a signal of eviction, use one of {}",
            EVICTION_SIGNALS.join(", ")
        ));
    }
}

/// Grace periods must be durations, and each soft threshold needs one: the kubelet ignores a threshold without a grace period, and
/// does not start with a grace period without a threshold.
fn check_grace_periods(map: &KubeletMap, problems: &mut Vec<String>) {
    let field = "evictionSoftGracePeriod";
    let periods: BTreeMap<_, _> = texts(map, field).collect();
    let thresholds: BTreeMap<_, _> = texts(map, "evictionSoft").collect();
    for (signal, period) in &periods {
        check_signal(field, signal, problems);
        match period.parse::<GoDuration>() {
            Ok(period) if !period.is_negative() => {}
            Ok(_) => problems.push(format!("spec.kubelet.{field}[{signal}]: {period:?} is negative")),
            Err(error) => problems.push(format!("spec.kubelet.{field}[{signal}]: {error}")),
        }
        if !thresholds.contains_key(signal) {
            problems.push(format!("spec.kubelet.{field}[{signal}]: evictionSoft has no threshold of this signal"));
        }
    }
    for signal in thresholds.keys().filter(|signal| !periods.contains_key(*signal)) {
        problems.push(format!("spec.kubelet.evictionSoft[{signal}]: {field} has no period of this signal"));
    }
}

fn check_numbers(map: &KubeletMap, problems: &mut Vec<String>) {
    let number = |field: &str| map.get(field).and_then(Value::as_i64);
    let (high, low) = ("imageGCHighThresholdPercent", "imageGCLowThresholdPercent");
    for field in [high, low] {
        if let Some(percent) = number(field).filter(|percent| !(0..=100).contains(percent)) {
            problems.push(format!("spec.kubelet.{field}: {percent} is not a percentage, 0 to 100"));
        }
    }
    for field in ["maxPods", "podsPerCore", "evictionMaxPodGracePeriod"] {
        if let Some(count) = number(field).filter(|count| *count < 0) {
            problems.push(format!("spec.kubelet.{field}: {count} is negative"));
        }
    }
    // The kubelet collects images above the high threshold until usage reaches the low one.
    if let (Some(high_percent), Some(low_percent)) = (number(high), number(low))
        && high_percent <= low_percent
    {
        problems.push(format!("spec.kubelet.{high}: {high_percent} is not above {low}, {low_percent}"));
    }
}

/// The problem of a threshold that is neither a percentage from 0 to 100 nor a non-negative quantity.
fn threshold_problem(threshold: &str) -> Option<&'static str> {
    if let Some(percent) = threshold.strip_suffix('%') {
        let in_range = percent.parse::<f64>().is_ok_and(|percent| (0.0..=100.0).contains(&percent));
        return (!in_range).then_some("is not a percentage, 0% to 100%");
    }
    if !is_quantity(threshold) {
        return Some("is neither a percentage nor a quantity");
    }
    let nothing =
        !threshold.bytes().take_while(|byte| !byte.is_ascii_alphabetic()).any(|byte| (b'1'..=b'9').contains(&byte));
    (threshold.starts_with('-') && !nothing).then_some("is negative")
}

/// The entries of a map of strings; none where the member is absent or has another type, which the schema check reports.
fn texts<'a>(map: &'a KubeletMap, field: &str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let entries = map.get(field).and_then(Value::as_object).into_iter().flatten();
    entries.filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)))
}

/// The members that are expressions.
fn expressions(map: &KubeletMap) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for field in ["kubeReserved", "systemReserved"] {
        let held = texts(map, field).filter(|(_, amount)| !is_quantity(amount));
        found.extend(held.map(|(resource, _)| format!("{field}[{resource}]")));
    }
    if map.get("maxPods").is_some_and(Value::is_string) {
        found.push("maxPods".to_owned());
    }
    found
}

/// Settings that nodes of the family would not get.
fn unsupported(family: AmiFamily, map: &KubeletMap, kubelet: &Kubelet) -> Vec<String> {
    if family == AmiFamily::Custom || family.passes_all_kubelet_fields() {
        return Vec::new();
    }
    let mut problems = Vec::new();
    let per_core = kubelet.pods_per_core.is_some() && !family.honors_pods_per_core();
    let lost = |name: &&str| !INTERPRETED.contains(name) || (per_core && *name == "podsPerCore");
    let lost: Vec<&str> = map.keys().map(String::as_str).filter(lost).collect();
    if !lost.is_empty() {
        problems.push(format!("spec.kubelet: nodes of the AMI family {family} can't be given {}", lost.join(", ")));
    }
    let addresses = kubelet.cluster_dns.as_ref().map_or(0, Vec::len);
    if addresses > 1 {
        problems.push(format!(
            "spec.kubelet.clusterDNS: nodes of the AMI family {family} take one address, found {addresses}"
        ));
    }
    problems
}

#[cfg(test)]
mod tests;
