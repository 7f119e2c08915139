//! Errors of the input, and the parsing of one object.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Invalid input; the message names the file, the object and the field.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// A file cannot be read.
    #[error("{}: {error}", .file.display())]
    Read {
        /// File.
        file: PathBuf,
        /// Cause.
        error: std::io::Error,
    },
    /// The text is neither JSON nor YAML, or has an unexpected shape.
    #[error("{}: {problem}", .file.display())]
    Syntax {
        /// File.
        file: PathBuf,
        /// The error and its position.
        problem: String,
    },
    /// A field of an object is invalid.
    #[error("{}: {object}: {problem}", .file.display())]
    Object {
        /// File.
        file: PathBuf,
        /// Kind and name.
        object: String,
        /// Field and error.
        problem: String,
    },
}

/// The name of an object, for messages.
pub fn named(object: &Value) -> String {
    object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("without a name").to_owned()
}

/// Parses an object of a kind.
///
/// # Errors
/// A field is invalid.
pub fn typed<T: DeserializeOwned>(file: &Path, kind: &str, object: Value) -> Result<T, InputError> {
    let name = named(&object);
    typed_as(file, &format!("{kind} {name}"), object)
}

/// Parses an object, which messages call `name`.
///
/// # Errors
/// A field is invalid.
pub fn typed_as<T: DeserializeOwned>(file: &Path, name: &str, object: Value) -> Result<T, InputError> {
    serde_path_to_error::deserialize(object).map_err(|error| InputError::Object {
        file: file.into(),
        object: name.to_owned(),
        problem: format!("{}: {}", error.path(), error.inner()),
    })
}
