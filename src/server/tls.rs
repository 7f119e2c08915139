//! Certificates: loads and validates them, and reloads them when their files rotate.
//!
//! All certificates and CAs in use are in one `rustls::ServerConfig` that is swapped atomically: a connection gets the old set or the
//! new set, never a mix, and open connections continue. The files are read by path each time and compared by content.
//!
//! A handshake accepts a certificate of any client CA. Which routes it opens is decided per connection, by the CA of each route.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use axum_server::tls_rustls::RustlsConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{InconsistentKeys, RootCertStore};
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;
use tokio::time::MissedTickBehavior;

use crate::server::app_state::{AppState, Expiries};
use crate::server::certificate_error::CertificateError;
use crate::server::certificate_files::{Files, Paths};
use crate::server::client_access::{Access, Accesses, Clients, RouteClients};
use crate::server::server_settings::ServerConfig;

/// Certificates in use and their files.
pub struct Certificates {
    paths: Paths,
    names: Names,
    rustls: RustlsConfig,
    clients: ArcSwap<Clients>,
    current: Mutex<Current>,
}

/// The names of the clients of each route.
struct Names {
    extender: Vec<String>,
    webhook: Vec<String>,
    debug: Vec<String>,
}

/// The content that was read last, valid or not: the same content is neither loaded nor reported twice.
struct Current {
    last_read: Files,
    expiries: Expiries,
}

struct Loaded {
    config: rustls::ServerConfig,
    clients: Clients,
    expiries: Expiries,
}

/// A client CA: its certificates and when the first of them expires.
struct Authority {
    roots: RootCertStore,
    expires_at: UnixMillis,
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
        let paths = Paths::new(config);
        let names = Names {
            extender: config.extender_client_names.clone(),
            webhook: config.webhook_client_names.clone(),
            debug: config.debug_client_names.clone(),
        };
        let last_read = paths.read().await?;
        let loaded = load(&paths, &names, &last_read)?;
        if loaded.expiries.client_ca.is_none() {
            tracing::warn!(path = %paths.client_ca.display(), "no client CA, extender requests will be answered 403");
        }
        Ok(Self {
            paths,
            names,
            rustls: RustlsConfig::from_config(Arc::new(loaded.config)),
            clients: ArcSwap::from_pointee(loaded.clients),
            current: Mutex::new(Current { last_read, expiries: loaded.expiries }),
        })
    }

    /// Reads the files again and applies changes to new connections. `Ok(false)` if nothing changed since the last call.
    ///
    /// # Errors
    /// The new files are unusable. The certificates in use stay, and the same content is not loaded again.
    pub async fn reload(&self) -> Result<bool, CertificateError> {
        let files = self.paths.read().await?;
        let mut current = lock(&self.current);
        if current.last_read == files {
            return Ok(false);
        }
        let loaded = load(&self.paths, &self.names, &files);
        current.last_read = files;
        let loaded = loaded?;
        current.expiries = loaded.expiries;
        self.clients.store(Arc::new(loaded.clients));
        self.rustls.reload_from_config(Arc::new(loaded.config));
        Ok(true)
    }

    /// The routes that a chain of certificates opens, which is empty without a certificate.
    pub(crate) fn accesses(&self, chain: &[CertificateDer<'_>]) -> Accesses {
        self.clients.load().accesses(chain)
    }

    /// Whether a chain of certificates opens the state now.
    pub(crate) fn access_to_state(&self, chain: &[CertificateDer<'_>]) -> Access {
        self.clients.load().access_to_state(chain)
    }

    /// Expiry of the serving certificate.
    pub fn expires_at(&self) -> UnixMillis {
        lock(&self.current).expiries.serving
    }

    pub(crate) fn rustls(&self) -> &RustlsConfig {
        &self.rustls
    }

    pub(crate) fn note_expiries(&self, state: &AppState) {
        state.readiness.set_expiries(lock(&self.current).expiries);
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

/// The configuration of TLS, and the clients of each route.
fn load(paths: &Paths, names: &Names, files: &Files) -> Result<Loaded, CertificateError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = certificates(&paths.certificate, &files.certificate)?;
    let serving = expiry(&paths.certificate, &chain[..1])?;
    let chain_expiry = expiry(&paths.certificate, &chain)?;
    let key = PrivateKeyDer::from_pem_slice(&files.key).map_err(|cause| match cause {
        rustls::pki_types::pem::Error::NoItemsFound => {
            CertificateError::Empty { path: paths.key.clone(), expected: "private key" }
        }
        cause => broken(&paths.key, &cause),
    })?;
    let pair = CertifiedKey::from_der(chain, key, &provider).map_err(|cause| match cause {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            CertificateError::Mismatch { certificate: paths.certificate.clone(), key: paths.key.clone() }
        }
        cause => broken(&paths.key, &cause),
    })?;

    let builder = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|cause| broken(&paths.certificate, &cause))?;
    let extender = authority(Some(&paths.client_ca).zip(files.client_ca.as_deref()))?;
    let webhook = authority(paths.webhook_client_ca.as_ref().zip(files.webhook_client_ca.as_deref()))?;
    let roots: Vec<_> =
        [&extender, &webhook].into_iter().flatten().flat_map(|authority| &authority.roots.roots).collect();
    let builder = if roots.is_empty() {
        builder.with_no_client_auth()
    } else {
        // Most API servers call the webhook without a certificate, so a client certificate is optional but must be valid.
        let roots = RootCertStore { roots: roots.into_iter().cloned().collect() };
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .allow_unauthenticated()
            .build()
            .map_err(|cause| broken(&paths.client_ca, &cause))?;
        builder.with_client_cert_verifier(verifier)
    };
    let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(pair)));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let expires_at = |authority: &Option<Authority>| authority.as_ref().map(|authority| authority.expires_at);
    let expiries = Expiries {
        serving,
        chain: chain_expiry,
        client_ca: expires_at(&extender),
        webhook_client_ca: expires_at(&webhook),
    };
    let extender = clients(&paths.client_ca, extender, &names.extender, &provider)?;
    let debug = extender.as_ref().map(|scheduler| RouteClients {
        verifier: Arc::clone(&scheduler.verifier),
        // A certificate may have an empty name.
        names: names.debug.iter().filter(|name| !name.is_empty()).cloned().collect(),
    });
    let clients = Clients { extender, debug, webhook: clients(&paths.client_ca, webhook, &names.webhook, &provider)? };
    Ok(Loaded { config, clients, expiries })
}

/// The certificates of a client CA, if it has a file.
fn authority(file: Option<(&PathBuf, &[u8])>) -> Result<Option<Authority>, CertificateError> {
    let Some((path, pem)) = file else { return Ok(None) };
    let authorities = certificates(path, pem)?;
    let expires_at = expiry(path, &authorities)?;
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority).map_err(|cause| broken(path, &cause))?;
    }
    Ok(Some(Authority { roots, expires_at }))
}

/// The clients of a route, if it has a CA.
fn clients(
    path: &Path,
    authority: Option<Authority>,
    names: &[String],
    provider: &Arc<CryptoProvider>,
) -> Result<Option<RouteClients>, CertificateError> {
    let Some(authority) = authority else { return Ok(None) };
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(authority.roots), Arc::clone(provider));
    let verifier = builder.build().map_err(|cause| broken(path, &cause))?;
    Ok(Some(RouteClients { verifier, names: names.to_vec() }))
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
