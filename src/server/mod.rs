//! The HTTPS service: admission webhook and scheduler extender, and the plain-text listeners for health and metrics.
//!
//! Handlers do no I/O: they read [`AppState`] and call pure functions. No client can stop the service: bodies, request times and
//! connections are bounded, and a panicking handler answers 500.
//!
//! | listener | route | who may call |
//! |---|---|---|
//! | HTTPS | `POST /mutate` | anyone (most API servers present no client certificate), or with a CA for it the holder of a certificate for one of its names; 403 otherwise |
//! | HTTPS | `POST /v1/filter`, `/v1/prioritize`, `/v1/preempt` | holders of a certificate signed by the client CA for one of the scheduler's names; 403 otherwise |
//! | HTTPS | `GET /debug/state` | holders of a certificate signed by the client CA for one of the operators' names; 403 otherwise |
//! | HTTPS, health | `GET /livez`, `/healthz`, `/readyz` | anyone |
//! | metrics | `GET /metrics` | anyone |

pub mod accept;
pub mod app_state;
pub mod certificate_error;
pub mod certificate_files;
pub mod client_access;
pub mod connections;
pub mod debug;
pub mod debug_source;
pub mod health;
pub mod intake;
pub mod middleware;
pub mod routes;
pub mod series_source;
pub mod server_settings;
pub mod tls;
pub mod verbs;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum_server::Handle;
use hyper_util::rt::TokioTimer;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub use crate::server::app_state::AppState;
pub use crate::server::certificate_error::CertificateError;
pub use crate::server::connections::Limits;
pub use crate::server::server_settings::{Bounds, ServerConfig};
pub use crate::server::tls::Certificates;

use crate::server::accept::{Bounded, TlsAccept};
use crate::server::connections::Connections;

/// The service could not start, or failed.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An address cannot be bound.
    #[error("can't listen on {addr} for {what}: {source}; free the port or choose another address")]
    Bind {
        /// `https`, `metrics` or `health`.
        what: &'static str,
        /// Address.
        addr: SocketAddr,
        /// Cause.
        source: io::Error,
    },
    /// The certificates are unusable.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// A listener failed.
    #[error("the {what} listener ended: {source}")]
    Listener {
        /// `https`, `metrics` or `health`.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
}

/// The bound addresses, with the ports that the system selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundAddrs {
    /// HTTPS.
    pub https: SocketAddr,
    /// Metrics.
    pub metrics: Option<SocketAddr>,
    /// Health.
    pub health: Option<SocketAddr>,
}

/// A running service. Dropping it stops it immediately; [`Server::shutdown`] drains it first.
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

/// Time limit for open requests before a restart. Until it, nobody serves on the ports of this replica, and a peer that vanished holds its
/// connections open for the whole time.
const RESTART_DRAIN: Duration = Duration::from_secs(1);

/// Why the server stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// The replica is deleted: open requests may take their time.
    Stop,
    /// The process starts over: the sooner, the better.
    Restart,
}

impl Server {
    /// Loads the certificates, binds every address and serves. Returns as soon as connections are accepted.
    ///
    /// # Errors
    /// A certificate, key or CA is missing, unreadable or does not match, or an address cannot be bound.
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
            Bounded(Connections::new("https", config.connections, &state.metrics)),
            Arc::clone(&certificates),
            config.handshake_timeout,
        );
        let mut listeners = vec![spawn("https", https, acceptor, routes::https(&config, &state))];
        let plain = [("metrics", metrics, routes::metrics(&state)), ("health", health, routes::health(&state))];
        for (what, bound, router) in plain {
            if let Some((listener, _)) = bound {
                let acceptor = Bounded(Connections::new(what, config.connections, &state.metrics));
                listeners.push(spawn(what, listener, acceptor, router));
            }
        }
        let poll = tokio::spawn(tls::poll(Arc::clone(&certificates), Arc::clone(&state), config.cert_poll));
        let shown = |addr: Option<SocketAddr>| addr.map(|addr| addr.to_string());
        tracing::info!(https = %addrs.https, metrics = shown(addrs.metrics), health = shown(addrs.health), "serving");
        Ok(Self { addrs, certificates, state, listeners, poll, drain_timeout: config.drain_timeout })
    }

    /// The bound addresses, with the ports that the system selected.
    pub fn addrs(&self) -> BoundAddrs {
        self.addrs
    }

    /// The certificates in use.
    pub fn certificates(&self) -> &Certificates {
        &self.certificates
    }

    /// Serves until `shutdown` completes, then drains.
    ///
    /// # Errors
    /// A listener failed.
    pub async fn run_until(mut self, shutdown: impl Future<Output = Shutdown>) -> Result<(), ServerError> {
        let ended = {
            let tasks = self.listeners.iter_mut().map(|listener| {
                let what = listener.what;
                let task = &mut listener.task;
                Box::pin(async move { (what, task.await) })
            });
            tokio::select! {
                ((what, result), _, _) = futures::future::select_all(tasks) => Some((what, result)),
                kind = shutdown => {
                    if kind == Shutdown::Restart {
                        self.drain_timeout = self.drain_timeout.min(RESTART_DRAIN);
                    }
                    None
                }
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

    /// Becomes unready, refuses new connections, waits for open requests within the drain timeout, stops.
    pub async fn shutdown(mut self) {
        self.state.readiness.set_draining();
        for listener in &self.listeners {
            listener.handle.graceful_shutdown(Some(self.drain_timeout));
        }
        for listener in std::mem::take(&mut self.listeners) {
            match listener.task.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(listener = listener.what, %error, "listener failed"),
                Err(error) => tracing::warn!(listener = listener.what, %error, "listener failed"),
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

/// Serves `router` on `listener` in its own task.
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
    // Longer than the 90 s idle timeout of Go clients, so that they never write to a connection that the server has closed.
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
