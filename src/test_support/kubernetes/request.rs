//! Requests that the fake API server records, and the failures that tests inject into them.

use std::collections::BTreeMap;

use hyper::Method;
use serde_json::Value;

use crate::test_support::kubernetes::object_store::{Key, Refusal};

/// A request that the server received.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub method: Method,
    pub key: Key,
    /// `status`, `eviction`, or empty.
    pub subresource: String,
    pub query: BTreeMap<String, String>,
    pub content_type: String,
    pub body: Value,
}

impl Recorded {
    /// Method and path, such as `PATCH nodeclaims/c/status`.
    pub fn line(&self) -> String {
        let mut line = format!("{} {}", self.method, self.key);
        if !self.subresource.is_empty() {
            line = format!("{line}/{}", self.subresource);
        }
        line.trim_end_matches('/').to_owned()
    }

    /// Whether it writes an object other than an event.
    pub fn is_write(&self) -> bool {
        let kept = !matches!(self.key.resource.as_str(), "events" | "subjectaccessreviews");
        self.method != Method::GET && kept && !self.is_dry_run()
    }

    /// Whether it has no effect by request.
    pub fn is_dry_run(&self) -> bool {
        self.query.get("dryRun").is_some_and(|value| value == "All")
    }
}

/// The failure of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The server rejects it.
    Refused(Refusal),
    /// Another client writes the object just before; the request is then served as usual.
    WrittenByAnother,
    /// Another client deletes the object just before, finalizers notwithstanding.
    DeletedByAnother,
    /// It has no effect, and no response ever arrives.
    NoAnswer,
    /// It takes effect, and the connection breaks before the response.
    LostAnswer,
    /// The process crashes before the request arrives.
    CrashBefore,
    /// The process crashes after the request has taken effect and before the response.
    CrashAfter,
}

/// The object and the subresource that a path names: `/api/v1/...` or `/apis/GROUP/VERSION/...`.
pub fn target(path: &str) -> (Key, String) {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let rest = if parts[0] == "api" { &parts[2..] } else { &parts[3..] };
    let (namespace, rest) = if rest[0] == "namespaces" && rest.len() > 2 { (rest[1], &rest[2..]) } else { ("", rest) };
    let part = |at: usize| rest.get(at).copied().unwrap_or_default();
    (Key::new(part(0), namespace, part(1)), part(2).to_owned())
}
