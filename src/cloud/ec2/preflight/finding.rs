//! One row of the report: a check, its result, the detail and the remediation.

use serde::Serialize;

use crate::ec2::aws::errors::{ApiError, Class};

/// Maximum length of an API's error message, in characters.
const MAX_MESSAGE_CHARS: usize = 240;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckResult {
    /// No action is needed.
    Ok,
    /// Stowage works with a limitation, or the check could not be run.
    Warning,
    /// Nodes can't be launched, or a requested feature does not work.
    Failed,
}

impl CheckResult {
    /// As it is printed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
        }
    }
}

/// The outcome of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub check: String,
    pub result: CheckResult,
    pub detail: String,
    /// The remediation; empty where no action is needed.
    pub fix: String,
}

impl Finding {
    pub fn ok(check: &str, detail: String) -> Self {
        Self { check: check.to_owned(), result: CheckResult::Ok, detail, fix: String::new() }
    }

    pub fn warning(check: &str, detail: String, fix: String) -> Self {
        Self { check: check.to_owned(), result: CheckResult::Warning, detail, fix }
    }

    pub fn failed(check: &str, detail: String, fix: String) -> Self {
        Self { check: check.to_owned(), result: CheckResult::Failed, detail, fix }
    }

    /// The same finding with the name of the node class in front of the check.
    #[must_use]
    pub(crate) fn of_class(mut self, class: &str) -> Self {
        self.check = format!("{class}: {}", self.check);
        self
    }
}

/// An error in one line, shortened.
pub fn brief(error: &ApiError) -> String {
    let text = error.to_string();
    let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match one_line.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{}…", &one_line[..end]),
        None => one_line,
    }
}

/// The remediation for an error.
pub fn remediation(error: &ApiError) -> String {
    match error.class {
        Class::Unauthorized => format!("allow {}; docs/aws has the policy", error.action),
        Class::Throttled => "try again later".to_owned(),
        Class::Server | Class::NoResponse => {
            "try again; check the endpoint, the network and the credentials".to_owned()
        }
        _ => "see the AWS message".to_owned(),
    }
}
