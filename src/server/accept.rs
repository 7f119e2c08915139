//! Accepts connections: enforces the limit per listener and records whether the peer presented a client certificate.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use axum_server::accept::Accept;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use futures::FutureExt;
use futures::future::BoxFuture;
use prometheus::IntGauge;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::telemetry::Metrics;

/// Facts about the peer of a connection; an extension of each of its requests.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// Whether it presented a certificate signed by the client CA. Any other certificate fails the handshake.
    pub(crate) certified: bool,
    /// Counts against the connection limit while the connection or one of its requests lives.
    _place: Arc<Place>,
}

#[derive(Debug)]
struct Place {
    _permit: OwnedSemaphorePermit,
    open: IntGauge,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.dec();
    }
}

/// Accepts plain connections up to a limit. Connections beyond the limit are closed at once: a queue would hide the overload from clients.
#[derive(Clone, Debug)]
pub(crate) struct Bounded {
    what: &'static str,
    places: Arc<Semaphore>,
    metrics: Metrics,
}

impl Bounded {
    pub(crate) fn new(what: &'static str, connections: usize, metrics: &Metrics) -> Self {
        let connections = connections.min(Semaphore::MAX_PERMITS);
        Self { what, places: Arc::new(Semaphore::new(connections)), metrics: metrics.clone() }
    }

    fn place(&self) -> io::Result<Arc<Place>> {
        let Ok(permit) = Arc::clone(&self.places).try_acquire_owned() else {
            self.metrics.connections_refused.with_label_values(&[self.what]).inc();
            return Err(io::Error::other("too many connections"));
        };
        let open = self.metrics.connections.with_label_values(&[self.what]);
        open.inc();
        Ok(Arc::new(Place { _permit: permit, open }))
    }
}

impl Accept<TcpStream, Router> for Bounded {
    type Stream = TcpStream;
    type Service = Router;
    type Future = std::future::Ready<io::Result<(TcpStream, Router)>>;

    fn accept(&self, stream: TcpStream, router: Router) -> Self::Future {
        std::future::ready(self.place().map(|place| {
            let peer = Peer { certified: false, _place: place };
            (stream, router.layer(Extension(peer)))
        }))
    }
}

/// Accepts TLS connections up to a limit.
#[derive(Clone, Debug)]
pub(crate) struct TlsAccept {
    bounded: Bounded,
    tls: RustlsAcceptor,
}

impl TlsAccept {
    pub(crate) fn new(bounded: Bounded, config: RustlsConfig, handshake_timeout: Duration) -> Self {
        Self { bounded, tls: RustlsAcceptor::new(config).handshake_timeout(handshake_timeout) }
    }
}

impl Accept<TcpStream, Router> for TlsAccept {
    type Stream = <RustlsAcceptor as Accept<TcpStream, Router>>::Stream;
    type Service = Router;
    type Future = BoxFuture<'static, io::Result<(Self::Stream, Router)>>;

    fn accept(&self, stream: TcpStream, router: Router) -> Self::Future {
        let place = self.bounded.place();
        // Responses are small and kube-scheduler awaits them one by one: disable Nagle's algorithm.
        let handshake = stream.set_nodelay(true).map(|()| self.tls.accept(stream, router));
        async move {
            let place = place?;
            let (stream, router) =
                handshake?.await.inspect_err(|error| tracing::debug!(%error, "tls handshake failed"))?;
            let certified = stream.get_ref().1.peer_certificates().is_some_and(|chain| !chain.is_empty());
            let router = router.layer(Extension(Peer { certified, _place: place }));
            Ok((stream, router))
        }
        .boxed()
    }
}
