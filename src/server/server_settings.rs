//! Settings of the service: addresses, certificates and limits.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::server::connections::Limits;

/// Addresses, certificates and limits of the service.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// HTTPS address; port 0 selects a free port.
    pub https_addr: SocketAddr,
    /// Directory with `tls.crt` and `tls.key`, and usually `ca.crt`: a mounted Secret of type `kubernetes.io/tls`.
    pub cert_dir: PathBuf,
    /// CA that signs client certificates; `None` selects `ca.crt` in [`ServerConfig::cert_dir`] if it exists. Without a CA,
    /// extender requests are answered 403.
    pub client_ca: Option<PathBuf>,
    /// Names of the scheduler: common names, DNS names or URIs of the client certificates that the extender accepts.
    pub extender_client_names: Vec<String>,
    /// CA that signs the client certificate of the API server; `None` admits anyone to the webhook.
    pub webhook_client_ca: Option<PathBuf>,
    /// Names of the API server, as [`ServerConfig::extender_client_names`]. Only used with [`ServerConfig::webhook_client_ca`].
    pub webhook_client_names: Vec<String>,
    /// Names of operators, as [`ServerConfig::extender_client_names`] and of the same CA: they may read `/debug/state`.
    pub debug_client_names: Vec<String>,
    /// Address of `/metrics`; `None` disables the listener.
    pub metrics_addr: Option<SocketAddr>,
    /// Address of plain `/livez`, `/healthz` and `/readyz`; `None` serves them on HTTPS only.
    pub health_addr: Option<SocketAddr>,
    /// Interval between reads of the certificate files.
    pub cert_poll: Duration,
    /// Limits of the connections of each listener.
    pub connections: Limits,
    /// Time limit of a TLS handshake.
    pub handshake_timeout: Duration,
    /// Time limit of a request, reading its body included.
    pub request_timeout: Duration,
    /// Time limit for open requests during shutdown.
    pub drain_timeout: Duration,
    /// Bounds of the requests to `/mutate`, which anyone may send.
    pub webhook: Bounds,
    /// Bounds of the requests to the extender.
    pub extender: Bounds,
}

impl ServerConfig {
    /// The defaults, with certificates from `cert_dir`: HTTPS on 9443, metrics on 8080 and health on 8081, on all addresses.
    #[must_use]
    pub fn new(cert_dir: impl Into<PathBuf>) -> Self {
        let everywhere = |port| SocketAddr::from(([0, 0, 0, 0], port));
        Self {
            https_addr: everywhere(9443),
            cert_dir: cert_dir.into(),
            client_ca: None,
            extender_client_names: vec!["stowage-scheduler".into()],
            webhook_client_ca: None,
            webhook_client_names: vec!["kube-apiserver".into()],
            debug_client_names: vec!["stowage-debug".into()],
            metrics_addr: Some(everywhere(8080)),
            health_addr: Some(everywhere(8081)),
            cert_poll: Duration::from_secs(10),
            connections: Limits {
                connections: 1024,
                // Both are longer than the 90 s idle timeout of Go clients, which also keep connections that they have not used yet, so
                // that they never write to a connection that the server has closed.
                first_request: Duration::from_secs(100),
                idle: Duration::from_mins(5),
            },
            handshake_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(10),
            // The API server accepts no object over 3 MiB. A review of it as JSON values takes up to 35 times its bytes, twice.
            webhook: Bounds {
                body: 7 << 19,
                bytes: 32 << 20,
                bytes_per_peer: 8 << 20,
                bytes_guaranteed: 256 << 10,
                requests: 1024,
                requests_per_peer: 512,
                requests_guaranteed: 64,
                large: 64 << 10,
                large_at_a_time: 1,
            },
            extender: Bounds {
                body: 16 << 20,
                bytes: 64 << 20,
                bytes_per_peer: 64 << 20,
                bytes_guaranteed: 1 << 20,
                requests: 512,
                requests_per_peer: 512,
                requests_guaranteed: 64,
                large: 1 << 20,
                large_at_a_time: 2,
            },
        }
    }
}

/// Bounds of the requests of one route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Maximum body in bytes; larger bodies get 413.
    pub body: usize,
    /// Bytes of all bodies that are being read or processed; 429 beyond it.
    pub bytes: usize,
    /// The same, of one peer address.
    pub bytes_per_peer: usize,
    /// What a peer may always use, even when others use up the total.
    pub bytes_guaranteed: usize,
    /// Requests in progress; 429 beyond it.
    pub requests: usize,
    /// The same, of one peer address.
    pub requests_per_peer: usize,
    /// What a peer may always have in progress, even when others use up the total.
    pub requests_guaranteed: usize,
    /// Bodies above this size in bytes are processed on a blocking thread.
    pub large: usize,
    /// Large bodies that are processed at a time; the others wait within their time limit.
    pub large_at_a_time: usize,
}
