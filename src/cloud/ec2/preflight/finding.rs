//! One line of the answer: what was looked at, how it stands, and what to do.

use serde::Serialize;

use crate::cloud::ec2::aws::errors::{ApiError, Class};

/// Longest message of an API that is passed on, in characters.
const MESSAGE_CHARS: usize = 240;

/// How something stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// As it should be.
    Ok,
    /// Stowage works, but lacks something, or it could not be told.
    Warning,
    /// Nodes can't be launched, or something that was asked for does not work.
    Failed,
}

impl Grade {
    /// As it is printed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
        }
    }
}

/// What was found about one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: String,
    /// How it stands.
    pub result: Grade,
    /// What was found.
    pub detail: String,
    /// What to do; empty where there is nothing to do.
    pub fix: String,
}

impl Finding {
    /// It is as it should be.
    pub fn ok(check: &str, detail: String) -> Self {
        Self { check: check.to_owned(), result: Grade::Ok, detail, fix: String::new() }
    }

    /// Something is lost.
    pub fn warning(check: &str, detail: String, fix: String) -> Self {
        Self { check: check.to_owned(), result: Grade::Warning, detail, fix }
    }

    /// It doesn't work.
    pub fn failed(check: &str, detail: String, fix: String) -> Self {
        Self { check: check.to_owned(), result: Grade::Failed, detail, fix }
    }

    /// The same about a node class.
    #[must_use]
    pub(crate) fn of(mut self, class: &str) -> Self {
        self.check = format!("{class}: {}", self.check);
        self
    }
}

/// An error in one line.
pub fn brief(error: &ApiError) -> String {
    let text = error.to_string();
    let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match one_line.char_indices().nth(MESSAGE_CHARS) {
        Some((end, _)) => format!("{}…", &one_line[..end]),
        None => one_line,
    }
}

/// What helps against an error.
pub fn fix(error: &ApiError) -> String {
    match error.class {
        Class::Unauthorized => format!("allow {}; docs/aws has the policy", error.action),
        Class::Throttled => "try again later".to_owned(),
        Class::Server | Class::Unanswered => {
            "try again; check the endpoint, the network and the credentials".to_owned()
        }
        _ => "see what AWS says".to_owned(),
    }
}
