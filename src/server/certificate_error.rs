//! Why certificates are unusable.

use std::io;
use std::path::PathBuf;

/// The certificates are unusable.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("can't read {path}: {source}; mount the certificate's Secret there")]
    Read {
        /// File.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file lacks the expected content.
    #[error("{path} holds no {expected} in PEM form")]
    Empty {
        /// File.
        path: PathBuf,
        /// Expected content.
        expected: &'static str,
    },
    /// A file is malformed.
    #[error("{path} can't be used: {reason}")]
    Broken {
        /// File.
        path: PathBuf,
        /// The defect.
        reason: String,
    },
    /// Key and certificate do not match.
    #[error("the key in {key} does not belong to the certificate in {certificate}; replace both together")]
    Mismatch {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
    },
}
