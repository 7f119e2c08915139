//! Certificates: loads and validates them, and reloads them when their files rotate.
//!
//! All certificates and CAs in use are in one `rustls::ServerConfig` that is swapped atomically: a connection gets the old set or the
//! new set, never a mix, and open connections continue. A mounted Secret changes through its `..data` link, so the files are read by
//! path each time and compared by content.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum_server::tls_rustls::RustlsConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{InconsistentKeys, RootCertStore};
use tokio::time::MissedTickBehavior;

use crate::model::time::UnixMillis;
use crate::server::ServerConfig;
use crate::server::state::AppState;
use crate::sync::lock;

/// Reads until all files are of one version of a mounted Secret.
const READS: usize = 10;

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

/// Certificates in use and their files.
pub struct Certificates {
    paths: Paths,
    rustls: RustlsConfig,
    current: Mutex<Current>,
}

#[derive(Clone, Debug)]
struct Paths {
    /// The link that moves all files of a mounted Secret to a new version.
    data: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    client_ca: PathBuf,
    /// Whether the client CA is required, or optional.
    client_ca_required: bool,
}

/// The content that was read last, valid or not: the same content is neither loaded nor reported twice.
struct Current {
    seen: Files,
    expires_at: UnixMillis,
    client_ca_expires_at: Option<UnixMillis>,
}

#[derive(PartialEq, Eq)]
struct Files {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

struct Loaded {
    config: rustls::ServerConfig,
    expires_at: UnixMillis,
    client_ca_expires_at: Option<UnixMillis>,
}

impl std::fmt::Debug for Certificates {
    /// Prints paths only, never key material.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Certificates").field("paths", &self.paths).finish_non_exhaustive()
    }
}

impl Certificates {
    /// Reads and validates the files.
    pub(crate) async fn load(config: &ServerConfig) -> Result<Self, CertificateError> {
        let paths = Paths {
            data: config.cert_dir.join("..data"),
            certificate: config.cert_dir.join("tls.crt"),
            key: config.cert_dir.join("tls.key"),
            client_ca: config.client_ca.clone().unwrap_or_else(|| config.cert_dir.join("ca.crt")),
            client_ca_required: config.client_ca.is_some(),
        };
        let seen = paths.read().await?;
        let loaded = paths.load(&seen)?;
        let current =
            Current { seen, expires_at: loaded.expires_at, client_ca_expires_at: loaded.client_ca_expires_at };
        if current.client_ca_expires_at.is_none() {
            tracing::warn!(path = %paths.client_ca.display(), "no client CA, extender requests will be answered 403");
        }
        Ok(Self { paths, rustls: RustlsConfig::from_config(Arc::new(loaded.config)), current: Mutex::new(current) })
    }

    /// Reads the files again and applies changes to new connections. `Ok(false)` if nothing changed since the last call.
    ///
    /// # Errors
    /// The new files are unusable. The certificates in use stay, and the same content is not loaded again.
    pub async fn reload(&self) -> Result<bool, CertificateError> {
        let files = self.paths.read().await?;
        let mut current = lock(&self.current);
        if current.seen == files {
            return Ok(false);
        }
        let loaded = self.paths.load(&files);
        current.seen = files;
        let loaded = loaded?;
        current.expires_at = loaded.expires_at;
        current.client_ca_expires_at = loaded.client_ca_expires_at;
        self.rustls.reload_from_config(Arc::new(loaded.config));
        Ok(true)
    }

    /// Expiry of the serving certificate.
    pub fn expires_at(&self) -> UnixMillis {
        lock(&self.current).expires_at
    }

    pub(crate) fn rustls(&self) -> &RustlsConfig {
        &self.rustls
    }

    pub(crate) fn note_expiries(&self, state: &AppState) {
        let current = lock(&self.current);
        state.readiness.set_expiries(current.expires_at, current.client_ca_expires_at);
    }
}

/// Reloads the files periodically, until dropped.
pub(crate) async fn poll(certificates: Arc<Certificates>, state: Arc<AppState>, every: Duration) {
    let every = every.max(Duration::from_millis(1));
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let result = match certificates.reload().await {
            Ok(false) => continue,
            Ok(true) => {
                certificates.note_expiries(&state);
                tracing::info!(expires_at = %certificates.expires_at(), "certificates reloaded");
                "ok"
            }
            Err(error) => {
                tracing::error!(%error, "certificate reload failed, keeping the old certificates");
                "error"
            }
        };
        state.metrics.cert_reloads.with_label_values(&[result]).inc();
    }
}

impl Paths {
    /// The files, all of one version: the kubelet moves the link and deletes the old version at any moment.
    async fn read(&self) -> Result<Files, CertificateError> {
        let mut version = self.version().await;
        for _ in 1..READS {
            let files = self.read_once().await;
            let now = self.version().await;
            if version == now {
                return files;
            }
            version = now;
        }
        self.read_once().await
    }

    async fn version(&self) -> Option<PathBuf> {
        tokio::fs::read_link(&self.data).await.ok()
    }

    async fn read_once(&self) -> Result<Files, CertificateError> {
        let client_ca = match read(&self.client_ca).await {
            Ok(bytes) => Some(bytes),
            Err(CertificateError::Read { source, .. })
                if !self.client_ca_required && source.kind() == io::ErrorKind::NotFound =>
            {
                None
            }
            Err(error) => return Err(error),
        };
        Ok(Files { certificate: read(&self.certificate).await?, key: read(&self.key).await?, client_ca })
    }

    fn load(&self, files: &Files) -> Result<Loaded, CertificateError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chain = certificates(&self.certificate, &files.certificate)?;
        let expires_at = expiry(&self.certificate, &chain[..1])?;
        let key = PrivateKeyDer::from_pem_slice(&files.key).map_err(|cause| match cause {
            rustls::pki_types::pem::Error::NoItemsFound => {
                CertificateError::Empty { path: self.key.clone(), expected: "private key" }
            }
            cause => broken(&self.key, &cause),
        })?;
        let pair = CertifiedKey::from_der(chain, key, &provider).map_err(|cause| match cause {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                CertificateError::Mismatch { certificate: self.certificate.clone(), key: self.key.clone() }
            }
            cause => broken(&self.key, &cause),
        })?;

        let builder = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|cause| broken(&self.certificate, &cause))?;
        let (builder, client_ca_expires_at) = match &files.client_ca {
            None => (builder.with_no_client_auth(), None),
            Some(pem) => {
                let authorities = certificates(&self.client_ca, pem)?;
                let expires_at = expiry(&self.client_ca, &authorities)?;
                let mut roots = RootCertStore::empty();
                for authority in authorities {
                    roots.add(authority).map_err(|cause| broken(&self.client_ca, &cause))?;
                }
                // The API server calls the webhook without a certificate, so a client certificate is optional but must be valid.
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .allow_unauthenticated()
                    .build()
                    .map_err(|cause| broken(&self.client_ca, &cause))?;
                (builder.with_client_cert_verifier(verifier), Some(expires_at))
            }
        };
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(pair)));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Loaded { config, expires_at, client_ca_expires_at })
    }
}

async fn read(path: &Path) -> Result<Vec<u8>, CertificateError> {
    tokio::fs::read(path).await.map_err(|source| CertificateError::Read { path: path.to_owned(), source })
}

fn broken(path: &Path, cause: &dyn std::fmt::Display) -> CertificateError {
    CertificateError::Broken { path: path.to_owned(), reason: cause.to_string() }
}

/// The certificates of a PEM file; at least one.
fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let found: Vec<_> =
        CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|cause| broken(path, &cause))?;
    if found.is_empty() {
        return Err(CertificateError::Empty { path: path.to_owned(), expected: "certificate" });
    }
    Ok(found)
}

/// The earliest expiry of the certificates.
fn expiry(path: &Path, certificates: &[CertificateDer<'_>]) -> Result<UnixMillis, CertificateError> {
    let mut earliest = i64::MAX;
    for der in certificates {
        let (_, certificate) = x509_parser::parse_x509_certificate(der).map_err(|cause| broken(path, &cause))?;
        earliest = earliest.min(certificate.validity().not_after.timestamp().saturating_mul(1000));
    }
    Ok(UnixMillis(earliest))
}
