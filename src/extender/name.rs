//! Strings of a request.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// A name or UID, borrowed from the request where it has no escapes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Name<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl Name<'_> {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
