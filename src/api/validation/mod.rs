//! Validation of objects, independent of the API server.
//!
//! The API server rejects most invalid objects at admission (`crds/`). This module also finds invalid objects that were not read
//! from an API server (`stowage simulate`) or are older than a rule, and objects that can never be satisfied. The rules are
//! Karpenter's runtime validation, plus the check for requirements that contradict each other.

pub mod requirements;
pub mod syntax;

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::api::core::v1::Taint;
use stowage_model::labels;
use stowage_model::quantity::{QuantityError, parse_amount};

use crate::node_pool::{Budget, NodeClaimTemplateSpec, NodePoolSpec};
use crate::{NodeClassRef, duration};

pub use crate::validation::requirements::{contradictions, requirements};
pub use crate::validation::syntax::{is_label_value, is_qualified_name, is_quantity};

/// A validation error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct Invalid {
    /// Path of the field, such as `spec.template.spec.requirements[2].values[0]`.
    pub field: String,
    /// The error and the accepted values.
    pub message: String,
}

impl Invalid {
    fn new(field: impl fmt::Display, message: impl fmt::Display) -> Self {
        Self { field: field.to_string(), message: message.to_string() }
    }
}

/// All validation errors of a NodePool, in the order of its fields; empty when it is valid.
pub fn node_pool(spec: &NodePoolSpec) -> Vec<Invalid> {
    let mut invalid = Vec::new();
    let labels = spec.template.metadata.labels.clone().unwrap_or_default();
    for (key, value) in &labels {
        template_label(key, value, &mut invalid);
    }
    let NodeClaimTemplateSpec {
        taints,
        startup_taints,
        requirements: list,
        node_class_ref,
        termination_grace_period,
        expire_after,
    } = &spec.template.spec;
    let at = "spec.template.spec";
    let [taints, startup_taints] = [taints, startup_taints].map(|taints| taints.as_deref().unwrap_or_default());
    check_taints(at, taints, startup_taints, &mut invalid);
    invalid.extend(requirements(&format!("{at}.requirements"), list));
    invalid.extend(contradictions(&format!("{at}.requirements"), list, &labels));
    check_node_class_ref(at, node_class_ref, &mut invalid);
    check_durations(at, termination_grace_period.as_deref(), expire_after.as_deref(), &mut invalid);
    check_disruption(spec, &mut invalid);
    for (resource, amount) in spec.limits.iter().flatten() {
        if !is_quantity(&amount.0) {
            invalid.push(Invalid::new(
                format_args!("spec.limits.{resource}"),
                format_args!("'{}' is not an amount: write a number, as 100, 1500m or 64Gi", amount.0),
            ));
        } else if matches!(parse_amount(resource, &amount.0), Err(QuantityError::Negative(_))) {
            invalid.push(Invalid::new(
                format_args!("spec.limits.{resource}"),
                format_args!("'{}' is negative: write 0 for no nodes, or remove the limit", amount.0),
            ));
        }
    }
    if spec.weight.is_some_and(|weight| !(1..=100).contains(&weight)) {
        invalid.push(Invalid::new("spec.weight", "must be 1 to 100"));
    }
    if let Some(replicas) = spec.replicas {
        if replicas < 0 {
            invalid.push(Invalid::new("spec.replicas", "must be zero or more"));
        }
        if spec.weight.is_some() {
            invalid.push(Invalid::new("spec.weight", "a static NodePool (one with 'replicas') has no weight"));
        }
        for resource in spec.limits.iter().flat_map(|limits| limits.keys()).filter(|resource| *resource != "nodes") {
            invalid.push(Invalid::new(
                format_args!("spec.limits.{resource}"),
                "a static NodePool (one with 'replicas') supports only 'limits.nodes'",
            ));
        }
    }
    invalid
}

fn template_label(key: &str, value: &str, invalid: &mut Vec<Invalid>) {
    let field = format!("spec.template.metadata.labels[{key}]");
    if !is_qualified_name(key) {
        invalid.push(Invalid::new(&field, format_args!("'{key}' is not a label key")));
    } else if key == labels::NODE_POOL {
        invalid.push(Invalid::new(&field, "is restricted: it is set to the name of the NodePool"));
    } else if labels::is_restricted(key) {
        invalid.push(Invalid::new(&field, "is restricted: it can't be set by a NodePool"));
    }
    if !is_label_value(value) {
        invalid.push(Invalid::new(&field, not_a_label_value(value)));
    }
}

fn not_a_label_value(value: &str) -> String {
    format!(
        "'{value}' is not a label value: at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
    )
}

fn check_taints(at: &str, taints: &[Taint], startup_taints: &[Taint], invalid: &mut Vec<Invalid>) {
    let mut seen = BTreeSet::new();
    for (list, taints) in [("taints", taints), ("startupTaints", startup_taints)] {
        for (index, taint) in taints.iter().enumerate() {
            let field = format!("{at}.{list}[{index}]");
            if !is_qualified_name(&taint.key) {
                invalid.push(Invalid::new(
                    format_args!("{field}.key"),
                    format_args!("'{}' is not a taint key", taint.key),
                ));
            }
            if let Some(value) = taint.value.as_deref().filter(|value| !value.is_empty() && !is_qualified_name(value)) {
                invalid
                    .push(Invalid::new(format_args!("{field}.value"), format_args!("'{value}' is not a taint value")));
            }
            if !["NoSchedule", "PreferNoSchedule", "NoExecute", ""].contains(&taint.effect.as_str()) {
                invalid.push(Invalid::new(
                    format_args!("{field}.effect"),
                    format_args!("'{}' is none of NoSchedule, PreferNoSchedule, NoExecute", taint.effect),
                ));
            }
            if !seen.insert((taint.key.as_str(), taint.effect.as_str())) {
                invalid.push(Invalid::new(
                    field,
                    format_args!("{}:{} is there more than once in taints and startupTaints", taint.key, taint.effect),
                ));
            }
        }
    }
}

fn check_node_class_ref(at: &str, reference: &NodeClassRef, invalid: &mut Vec<Invalid>) {
    for (member, value) in [("group", &reference.group), ("kind", &reference.kind), ("name", &reference.name)] {
        if value.is_empty() {
            invalid.push(Invalid::new(format_args!("{at}.nodeClassRef.{member}"), "may not be empty"));
        }
    }
    if reference.group.contains('/') {
        invalid.push(Invalid::new(
            format_args!("{at}.nodeClassRef.group"),
            "is an API group without a version, as karpenter.k8s.aws",
        ));
    }
}

fn check_durations(
    at: &str,
    termination_grace_period: Option<&str>,
    expire_after: Option<&str>,
    invalid: &mut Vec<Invalid>,
) {
    if let Some(Err(error)) = termination_grace_period.map(duration::parse) {
        invalid.push(Invalid::new(format_args!("{at}.terminationGracePeriod"), error));
    }
    if let Some(Err(error)) = expire_after.map(duration::parse_or_never) {
        invalid.push(Invalid::new(format_args!("{at}.expireAfter"), error));
    }
}

fn check_disruption(spec: &NodePoolSpec, invalid: &mut Vec<Invalid>) {
    let disruption = &spec.disruption;
    if let Err(error) = duration::parse_or_never(&disruption.consolidate_after) {
        invalid.push(Invalid::new("spec.disruption.consolidateAfter", error));
    }
    let policies = ["WhenEmpty", "WhenEmptyOrUnderutilized", "Balanced"];
    if !policies.contains(&disruption.consolidation_policy.as_str()) {
        invalid.push(Invalid::new(
            "spec.disruption.consolidationPolicy",
            format_args!("'{}' is none of {}", disruption.consolidation_policy, policies.join(", ")),
        ));
    }
    for (index, budget) in disruption.budgets.iter().enumerate() {
        check_budget(&format!("spec.disruption.budgets[{index}]"), budget, invalid);
    }
}

fn check_budget(field: &str, budget: &Budget, invalid: &mut Vec<Invalid>) {
    let digits = budget.nodes.strip_suffix('%').unwrap_or(&budget.nodes);
    let number = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u32>().ok()).flatten();
    if number.is_none_or(|number| budget.nodes.ends_with('%') && number > 100) {
        invalid.push(Invalid::new(
            format_args!("{field}.nodes"),
            format_args!("'{}' is neither a count, as 5, nor a percentage up to 100%", budget.nodes),
        ));
    }
    let reasons = ["Underutilized", "Empty", "Drifted", "Unhealthy"];
    for (index, reason) in budget.reasons.iter().flatten().enumerate() {
        if !reasons.contains(&reason.as_str()) {
            invalid.push(Invalid::new(
                format_args!("{field}.reasons[{index}]"),
                format_args!("'{reason}' is none of {}", reasons.join(", ")),
            ));
        }
    }
    if budget.schedule.is_some() != budget.duration.is_some() {
        invalid.push(Invalid::new(field, "'schedule' and 'duration' must be set together"));
    }
    match budget.duration.as_deref().map(|text| (text, duration::parse(text))) {
        Some((_, Err(error))) => invalid.push(Invalid::new(format_args!("{field}.duration"), error)),
        Some((text, Ok(millis))) if millis % 60_000 != 0 => invalid.push(Invalid::new(
            format_args!("{field}.duration"),
            format_args!("'{text}' has seconds: write whole minutes, as 8h or 1h30m"),
        )),
        _ => {}
    }
    let macros = ["@annually", "@yearly", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"];
    if let Some(schedule) = &budget.schedule
        && !macros.contains(&schedule.trim())
        && schedule.split_whitespace().count() != 5
    {
        invalid.push(Invalid::new(
            format_args!("{field}.schedule"),
            format_args!("'{schedule}' is neither a cron line of five fields nor one of {}", macros.join(", ")),
        ));
    }
}

#[cfg(test)]
mod tests;
