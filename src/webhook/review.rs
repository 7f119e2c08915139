//! From an `AdmissionReview` to its response.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use stowage_model::labels::{NORMALIZED, WEBHOOK};

use crate::webhook::raw_pod::{list, object_mut, text};
use crate::webhook::rule_list::{RULES, Rules};

/// Maximum length of a warning in bytes: the API server truncates at 256 and recommends less than 120.
const WARNING_BYTES: usize = 119;
/// Maximum warnings in one response.
const WARNINGS: usize = 8;
/// Namespaces that are exempt, whatever the webhook configuration selects.
const EXCLUDED_NAMESPACES: [&str; 3] = ["kube-system", "kube-node-lease", "kube-public"];

/// A body that is not a review. The response is 400.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The body is not JSON.
    #[error("the body is no AdmissionReview: {0}")]
    Json(#[from] serde_json::Error),
    /// A member is missing or has the wrong type.
    #[error("the AdmissionReview's {member} is missing or is not {expected}")]
    Member {
        /// Path, such as `request.uid`.
        member: &'static str,
        /// The expected type.
        expected: &'static str,
    },
    /// It is a review of another version or another kind of object.
    #[error("the body is {api_version:?} {kind:?}, not admission.k8s.io/v1 AdmissionReview")]
    Version {
        /// `apiVersion`.
        api_version: String,
        /// `kind`.
        kind: String,
    },
}

/// The result of a review.
#[derive(Clone, Debug, PartialEq)]
pub struct Review {
    /// The `AdmissionReview` to return.
    pub response: Value,
    /// Ids of the rules that changed the pod.
    pub rules: Vec<&'static str>,
    pub result: ReviewResult,
}

/// Result of a review, for the metrics. Every result allows the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReviewResult {
    /// Not the creation of a pod, or an exempt pod.
    Exempt,
    /// No rule changed the pod.
    Unchanged,
    /// The response has a patch.
    Patched,
    /// Applying the patch did not produce the pod that the rules returned, so it was not sent: a defect, worth an alert.
    Doubtful,
}

impl ReviewResult {
    /// Name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exempt => "exempt",
            Self::Unchanged => "unchanged",
            Self::Patched => "patched",
            Self::Doubtful => "doubtful",
        }
    }
}

/// Reviews an `AdmissionReview` (`admission.k8s.io/v1`), given as bytes, with these rules. The pod is always allowed, with or without a
/// patch.
///
/// # Errors
/// The body is not such a review, or has no `request.uid`.
pub fn review(body: &[u8], rules: &Rules) -> Result<Review, AdmissionError> {
    let review: Value = serde_json::from_slice(body)?;
    let (api_version, kind) = (text(&review, "apiVersion"), text(&review, "kind"));
    if api_version != "admission.k8s.io/v1" || kind != "AdmissionReview" {
        return Err(AdmissionError::Version { api_version: shortened(api_version), kind: shortened(kind) });
    }
    let request = review
        .get("request")
        .filter(|request| request.is_object())
        .ok_or(AdmissionError::Member { member: "request", expected: "an object" })?;
    let uid = text(request, "uid");
    if uid.is_empty() {
        return Err(AdmissionError::Member { member: "request.uid", expected: "a non-empty string" });
    }
    if !creates_a_pod(request) {
        return Ok(answer(uid, ReviewResult::Exempt, ReviewOutcome::default()));
    }
    let pod = request
        .get("object")
        .filter(|object| object.is_object())
        .ok_or(AdmissionError::Member { member: "request.object", expected: "an object" })?;
    if is_exempt(request, pod) {
        return Ok(answer(uid, ReviewResult::Exempt, ReviewOutcome::default()));
    }
    let outcome = normalize(pod, rules);
    let result = match (&outcome.patch, outcome.doubtful) {
        (_, true) => ReviewResult::Doubtful,
        (Some(_), false) => ReviewResult::Patched,
        (None, false) => ReviewResult::Unchanged,
    };
    Ok(answer(uid, result, outcome))
}

fn creates_a_pod(request: &Value) -> bool {
    let resource = request.get("resource").unwrap_or(&Value::Null);
    text(request, "operation") == "CREATE"
        && text(resource, "group").is_empty()
        && text(resource, "resource") == "pods"
        && text(request, "subResource").is_empty()
}

/// Whether a pod is exempt: it opted out, is in an excluded namespace, is already bound, or is not placed by a scheduler (DaemonSet pods
/// are bound to their node by affinity; static pods belong to the kubelet).
fn is_exempt(request: &Value, pod: &Value) -> bool {
    let metadata = pod.get("metadata").unwrap_or(&Value::Null);
    let opted_out = metadata.get("labels").is_some_and(|labels| text(labels, WEBHOOK) == "ignore");
    let controls = |owner: &Value| owner.get("controller") == Some(&Value::Bool(true));
    let owned = list(metadata, "ownerReferences")
        .iter()
        .any(|owner| controls(owner) && matches!(text(owner, "kind"), "DaemonSet" | "Node"));
    let placed = pod.get("spec").is_some_and(|spec| !text(spec, "nodeName").is_empty());
    opted_out || owned || placed || EXCLUDED_NAMESPACES.contains(&text(request, "namespace"))
}

#[derive(Default)]
struct ReviewOutcome {
    patch: Option<String>,
    doubtful: bool,
    rules: Vec<&'static str>,
    warnings: Vec<String>,
}

fn normalize(pod: &Value, rules: &Rules) -> ReviewOutcome {
    let mut wanted = pod.clone();
    let mut outcome = ReviewOutcome::default();
    outcome.rules.extend(rules.iter().filter(|rule| (rule.apply)(&mut wanted)).map(|rule| rule.id));
    outcome.warnings.extend(rules.iter().flat_map(|rule| (rule.warnings)(&wanted)));
    if outcome.rules.is_empty() {
        return outcome;
    }
    if let Some(patch) = annotate(&mut wanted, &outcome.rules).and_then(|()| checked_patch(pod, &wanted)) {
        outcome.patch = Some(STANDARD.encode(patch));
    } else {
        outcome.doubtful = true;
        outcome.rules.clear();
    }
    outcome
}

/// Adds the rules to the pod's annotation, which keeps the rules of an earlier call. `None` when the metadata has an unexpected
/// shape.
fn annotate(pod: &mut Value, rules: &[&str]) -> Option<()> {
    let annotations = object_mut(pod.get_mut("metadata")?, "annotations")?;
    let before = annotations.get(NORMALIZED).and_then(Value::as_str).unwrap_or_default();
    let ids: Vec<&str> = RULES
        .iter()
        .map(|rule| rule.id)
        .filter(|id| rules.contains(id) || before.split(',').any(|earlier| earlier == *id))
        .collect();
    let ids = Value::from(ids.join(","));
    annotations.insert(NORMALIZED.to_owned(), ids);
    Some(())
}

/// The patch from `pod` to `wanted`, if applying it produces `wanted`.
fn checked_patch(pod: &Value, wanted: &Value) -> Option<Vec<u8>> {
    let patch = json_patch::diff(pod, wanted);
    let json = serde_json::to_vec(&patch).ok()?;
    // Parsed from its bytes, as the API server does.
    let reread: json_patch::Patch = serde_json::from_slice(&json).ok()?;
    let mut patched = pod.clone();
    json_patch::patch(&mut patched, &reread).ok()?;
    (patched == *wanted).then_some(json)
}

fn answer(uid: &str, result: ReviewResult, outcome: ReviewOutcome) -> Review {
    let mut response = Map::new();
    response.insert("uid".to_owned(), Value::from(uid));
    response.insert("allowed".to_owned(), Value::from(true));
    if let Some(patch) = outcome.patch {
        response.insert("patchType".to_owned(), Value::from("JSONPatch"));
        response.insert("patch".to_owned(), Value::from(patch));
        response.insert("auditAnnotations".to_owned(), json!({ "rules": outcome.rules.join(",") }));
    }
    let warnings: Vec<String> =
        outcome.warnings.iter().take(WARNINGS).map(|warning| shortened(&format!("stowage: {warning}"))).collect();
    if !warnings.is_empty() {
        response.insert("warnings".to_owned(), Value::from(warnings));
    }
    let response = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response});
    Review { response, rules: outcome.rules, result }
}

/// At most [`WARNING_BYTES`] of a text, truncated between characters, without line breaks.
fn shortened(text: &str) -> String {
    let mut end = text.len().min(WARNING_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests;
