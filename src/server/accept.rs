//! Accepts connections: enforces the limit per listener and records which routes the client certificate of the peer opens.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use axum_server::accept::Accept;
use axum_server::tls_rustls::RustlsAcceptor;
use futures::FutureExt;
use futures::future::BoxFuture;
use rustls::pki_types::CertificateDer;
use tokio::net::TcpStream;

use crate::server::client_access::{Access, Accesses};
use crate::server::connections::{Closable, Connections, Ticket};
use crate::server::tls::Certificates;

/// Facts about the peer of a connection; an extension of each of its requests.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// The routes that its certificate opens. A certificate of no client CA fails the handshake.
    pub(crate) access: Accesses,
    /// What it presented; `None` on plain listeners.
    pub(crate) presented: Option<Presented>,
    /// Its place among the open connections, while the connection or one of its requests lives.
    pub(crate) ticket: Arc<Ticket>,
}

/// The certificates of a peer, for a route that accepts them anew for each request.
#[derive(Clone, Debug)]
pub(crate) struct Presented {
    certificates: Arc<Certificates>,
    chain: Arc<[CertificateDer<'static>]>,
}

impl Presented {
    /// Whether they open the state now: they may have expired, and the CA may have been replaced, since the handshake.
    pub(crate) fn access_to_state(&self) -> Access {
        self.certificates.access_to_state(&self.chain)
    }
}

/// Accepts plain connections within the limits of [`Connections`].
#[derive(Clone, Debug)]
pub(crate) struct Bounded(pub(crate) Arc<Connections>);

impl Bounded {
    fn admit(&self, stream: TcpStream) -> io::Result<(Closable<TcpStream>, Arc<Ticket>)> {
        // Responses are small and kube-scheduler awaits them one by one: disable Nagle's algorithm.
        stream.set_nodelay(true)?;
        let peer = stream.peer_addr()?.ip().to_canonical();
        let ticket = self.0.admit(peer).ok_or_else(|| io::Error::other("too many connections"))?;
        Ok((Closable::new(stream, &ticket), Arc::new(ticket)))
    }
}

impl Accept<TcpStream, Router> for Bounded {
    type Stream = Closable<TcpStream>;
    type Service = Router;
    type Future = std::future::Ready<io::Result<(Self::Stream, Router)>>;

    fn accept(&self, stream: TcpStream, router: Router) -> Self::Future {
        // The plain listeners have none of the routes.
        let none = Access::NoCertificate;
        let access = Accesses { extender: none.clone(), webhook: none };
        let peer = |ticket| Peer { access, presented: None, ticket };
        std::future::ready(self.admit(stream).map(|(stream, ticket)| (stream, router.layer(Extension(peer(ticket))))))
    }
}

/// Accepts TLS connections within the limits of [`Connections`].
#[derive(Clone, Debug)]
pub(crate) struct TlsAccept {
    bounded: Bounded,
    tls: RustlsAcceptor,
    certificates: Arc<Certificates>,
}

impl TlsAccept {
    pub(crate) fn new(bounded: Bounded, certificates: Arc<Certificates>, handshake_timeout: Duration) -> Self {
        let tls = RustlsAcceptor::new(certificates.rustls().clone()).handshake_timeout(handshake_timeout);
        Self { bounded, tls, certificates }
    }
}

impl Accept<TcpStream, Router> for TlsAccept {
    type Stream = <RustlsAcceptor as Accept<Closable<TcpStream>, Router>>::Stream;
    type Service = Router;
    type Future = BoxFuture<'static, io::Result<(Self::Stream, Router)>>;

    fn accept(&self, stream: TcpStream, router: Router) -> Self::Future {
        let admitted = self.bounded.admit(stream);
        let handshake = admitted.map(|(stream, ticket)| (self.tls.accept(stream, router), ticket));
        let certificates = Arc::clone(&self.certificates);
        async move {
            let (handshake, ticket) = handshake?;
            let (stream, router) =
                handshake.await.inspect_err(|error| tracing::debug!(%error, "tls handshake failed"))?;
            let chain: Arc<[_]> = stream.get_ref().1.peer_certificates().unwrap_or_default().into();
            let access = certificates.accesses(&chain);
            let presented = Some(Presented { certificates, chain });
            let router = router.layer(Extension(Peer { access, presented, ticket }));
            Ok((stream, router))
        }
        .boxed()
    }
}
