//! The HTTPS service: admission webhook and scheduler extender, and the plain listeners for health and metrics.
//!
//! Handlers do no I/O: they read [`AppState`] and call the pure rooms. Nothing a client sends can stop the service: bodies, time
//! and connections are bounded, and a panicking handler answers 500.
//!
//! | listener | route | who may call |
//! |---|---|---|
//! | HTTPS | `POST /mutate` | anyone (the API server presents no client certificate) |
//! | HTTPS | `POST /v1/filter`, `/v1/prioritize`, `/v1/preempt` | holders of a certificate signed by the client CA, else 403 |
//! | HTTPS, health | `GET /livez`, `/healthz`, `/readyz` | anyone |
//! | metrics | `GET /metrics` | anyone |

pub mod accept;
pub mod health;
pub mod middleware;
pub mod routes;
pub mod state;
pub mod tls;
pub mod verbs;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum_server::Handle;
use hyper_util::rt::TokioTimer;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub use crate::server::state::{AppState, Readiness, system_now_ms};
pub use crate::server::tls::{CertificateError, Certificates};

use crate::server::accept::{Bounded, TlsAccept};

/// Where and how to serve.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// HTTPS address; port 0 takes any free port.
    pub https_addr: SocketAddr,
    /// Folder with `tls.crt` and `tls.key`, and usually `ca.crt`: a mounted Secret of type `kubernetes.io/tls`.
    pub cert_dir: PathBuf,
    /// CA that signs client certificates; `None` takes `ca.crt` of [`ServerConfig::cert_dir`] when it exists. Without either,
    /// the extender's verbs answer 403.
    pub client_ca: Option<PathBuf>,
    /// Address of `/metrics`; `None` serves none.
    pub metrics_addr: Option<SocketAddr>,
    /// Address of plain `/livez`, `/healthz` and `/readyz`; `None` serves them on HTTPS only.
    pub health_addr: Option<SocketAddr>,
    /// How often certificate files are read again.
    pub cert_poll: Duration,
    /// Open connections per listener; more are closed at once.
    pub max_connections: usize,
    /// Longest TLS handshake.
    pub handshake_timeout: Duration,
    /// Longest request, its body included.
    pub request_timeout: Duration,
    /// Longest wait for open requests when shutting down.
    pub drain_timeout: Duration,
    /// Largest body of `/mutate` in bytes; larger ones get 413.
    pub webhook_body_limit: usize,
    /// Largest body of an extender verb in bytes; larger ones get 413.
    pub extender_body_limit: usize,
}

impl ServerConfig {
    /// The usual settings, with certificates from `cert_dir`: HTTPS on 9443, metrics on 8080 and health on 8081, everywhere.
    #[must_use]
    pub fn new(cert_dir: impl Into<PathBuf>) -> Self {
        let everywhere = |port| SocketAddr::from(([0, 0, 0, 0], port));
        Self {
            https_addr: everywhere(9443),
            cert_dir: cert_dir.into(),
            client_ca: None,
            metrics_addr: Some(everywhere(8080)),
            health_addr: Some(everywhere(8081)),
            cert_poll: Duration::from_secs(10),
            max_connections: 1024,
            handshake_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(10),
            webhook_body_limit: 8 << 20,
            extender_body_limit: 16 << 20,
        }
    }
}

/// Why the service could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An address can't be listened on.
    #[error("can't listen on {addr} for {what}: {source}; free the port or choose another address")]
    Bind {
        /// `https`, `metrics` or `health`.
        what: &'static str,
        /// Address.
        addr: SocketAddr,
        /// Cause.
        source: io::Error,
    },
    /// The certificates can't be used.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// A listener ended by itself.
    #[error("the {what} listener ended: {source}")]
    Listener {
        /// `https`, `metrics` or `health`.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
}

/// Addresses that are really listened on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundAddrs {
    /// HTTPS.
    pub https: SocketAddr,
    /// Metrics.
    pub metrics: Option<SocketAddr>,
    /// Health.
    pub health: Option<SocketAddr>,
}

/// A running service. Dropping it stops it at once; [`Server::shutdown`] drains it first.
#[derive(Debug)]
pub struct Server {
    addrs: BoundAddrs,
    certificates: Arc<Certificates>,
    state: Arc<AppState>,
    listeners: Vec<Listener>,
    poll: JoinHandle<()>,
    drain_timeout: Duration,
}

#[derive(Debug)]
struct Listener {
    what: &'static str,
    handle: Handle<SocketAddr>,
    task: JoinHandle<io::Result<()>>,
}

/// Serves until `shutdown` completes, then drains. For callers that don't need the bound addresses; others use [`Server`].
///
/// # Errors
/// As [`Server::start`] and [`Server::run_until`].
pub async fn serve(
    config: ServerConfig,
    state: Arc<AppState>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServerError> {
    Server::start(config, state).await?.run_until(shutdown).await
}

impl Server {
    /// Loads the certificates, binds every address and serves. Returns as soon as connections are accepted.
    ///
    /// # Errors
    /// When a certificate, key or CA is missing, unreadable or doesn't match, or an address can't be bound.
    pub async fn start(config: ServerConfig, state: Arc<AppState>) -> Result<Self, ServerError> {
        let certificates = Arc::new(Certificates::load(&config).await?);
        certificates.note_expiries(&state);
        let (https, https_addr) = bind("https", config.https_addr).await?;
        let metrics = bind_optional("metrics", config.metrics_addr).await?;
        let health = bind_optional("health", config.health_addr).await?;
        let addrs = BoundAddrs {
            https: https_addr,
            metrics: metrics.as_ref().map(|(_, addr)| *addr),
            health: health.as_ref().map(|(_, addr)| *addr),
        };

        let acceptor = TlsAccept::new(
            Bounded::new("https", config.max_connections, &state.metrics),
            certificates.rustls().clone(),
            config.handshake_timeout,
        );
        let mut listeners = vec![spawn("https", https, acceptor, routes::https(&config, &state))];
        let plain = [("metrics", metrics, routes::metrics(&state)), ("health", health, routes::health(&state))];
        for (what, bound, router) in plain {
            if let Some((listener, _)) = bound {
                let acceptor = Bounded::new(what, config.max_connections, &state.metrics);
                listeners.push(spawn(what, listener, acceptor, router));
            }
        }
        let poll = tokio::spawn(tls::poll(Arc::clone(&certificates), Arc::clone(&state), config.cert_poll));
        let shown = |addr: Option<SocketAddr>| addr.map(|addr| addr.to_string());
        tracing::info!(https = %addrs.https, metrics = shown(addrs.metrics), health = shown(addrs.health), "serving");
        Ok(Self { addrs, certificates, state, listeners, poll, drain_timeout: config.drain_timeout })
    }

    /// Addresses that are really listened on.
    pub fn addrs(&self) -> BoundAddrs {
        self.addrs
    }

    /// Certificates in use.
    pub fn certificates(&self) -> &Certificates {
        &self.certificates
    }

    /// Serves until `shutdown` completes, then drains.
    ///
    /// # Errors
    /// When a listener ends by itself.
    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) -> Result<(), ServerError> {
        let ended = {
            let tasks = self.listeners.iter_mut().map(|listener| {
                let what = listener.what;
                let task = &mut listener.task;
                Box::pin(async move { (what, task.await) })
            });
            tokio::select! {
                ((what, result), _, _) = futures::future::select_all(tasks) => Some((what, result)),
                () = shutdown => None,
            }
        };
        if let Some((what, result)) = ended {
            self.listeners.retain(|listener| listener.what != what);
            self.shutdown().await;
            let source = match result {
                Ok(Ok(())) => io::Error::other("it was shut down"),
                Ok(Err(source)) => source,
                Err(join) => io::Error::other(join),
            };
            return Err(ServerError::Listener { what, source });
        }
        self.shutdown().await;
        Ok(())
    }

    /// Turns unready, refuses new connections, lets open requests end within the drain time-out, stops.
    pub async fn shutdown(mut self) {
        self.state.readiness.set_draining();
        for listener in &self.listeners {
            listener.handle.graceful_shutdown(Some(self.drain_timeout));
        }
        for listener in std::mem::take(&mut self.listeners) {
            match listener.task.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(listener = listener.what, %error, "listener ended badly"),
                Err(error) => tracing::warn!(listener = listener.what, %error, "listener ended badly"),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.poll.abort();
        for listener in &self.listeners {
            listener.handle.shutdown();
        }
    }
}

async fn bind(what: &'static str, addr: SocketAddr) -> Result<(TcpListener, SocketAddr), ServerError> {
    let failed = |source| ServerError::Bind { what, addr, source };
    let listener = TcpListener::bind(addr).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

async fn bind_optional(
    what: &'static str,
    addr: Option<SocketAddr>,
) -> Result<Option<(TcpListener, SocketAddr)>, ServerError> {
    match addr {
        Some(addr) => bind(what, addr).await.map(Some),
        None => Ok(None),
    }
}

/// Serves `router` on `listener` in a task of its own.
fn spawn<A>(what: &'static str, listener: TcpListener, acceptor: A, router: axum::Router) -> Listener
where
    A: axum_server::accept::Accept<tokio::net::TcpStream, axum::Router> + Clone + Send + Sync + 'static,
    A::Stream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send,
    A::Service: axum_server::service::SendService<axum::http::Request<hyper::body::Incoming>> + Send,
    A::Future: Send,
{
    let handle = Handle::new();
    let mut server = axum_server::Server::from_listener(listener).acceptor(acceptor).handle(handle.clone());
    let builder = server.http_builder();
    // Longer than the 90 s after which Go's clients close an idle connection, so that they never write into one that we closed.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(Duration::from_mins(2));
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_mins(1))
        .keep_alive_timeout(Duration::from_secs(20))
        .max_concurrent_streams(256);
    let task = tokio::spawn(server.serve(router.into_make_service()));
    Listener { what, handle, task }
}
