//! Generated certificates, and a TLS and HTTP client for the server under test.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::{http1, http2};
use hyper::header::HeaderMap;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub const HTTP1: &[u8] = b"http/1.1";
pub const HTTP2: &[u8] = b"h2";

/// A certificate authority.
pub struct Authority {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, as PEM.
#[derive(Clone)]
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    fn sign(&self, name: &str, usage: ExtendedKeyUsagePurpose) -> Pair {
        self.issue(CertificateParams::new(vec![name.to_owned()]).unwrap(), usage)
    }

    fn issue(&self, mut params: CertificateParams, usage: ExtendedKeyUsagePurpose) -> Pair {
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Pair { certificate, key: key.serialize_pem() }
    }

    pub fn server(&self) -> Pair {
        self.sign("localhost", ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// A certificate of the scheduler.
    pub fn client(&self) -> Pair {
        self.client_of("stowage-scheduler")
    }

    /// A client certificate with this DNS name.
    pub fn client_of(&self, name: &str) -> Pair {
        self.sign(name, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// A client certificate with this common name and no other name.
    pub fn client_with_common_name(&self, name: &str) -> Pair {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        self.issue(params, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// A serving certificate, followed by a certificate that expires in a day, as a renewed intermediate would.
    pub fn server_with_expiring_intermediate(&self) -> Pair {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_after = (std::time::SystemTime::now() + std::time::Duration::from_hours(24)).into();
        let intermediate = params.signed_by(&KeyPair::generate().unwrap(), &self.issuer).unwrap().pem();
        let Pair { certificate, key } = self.server();
        Pair { certificate: certificate + &intermediate, key }
    }
}

impl Pair {
    /// Writes `tls.crt` and `tls.key`.
    pub fn write(&self, dir: &Path) {
        replace(&dir.join("tls.crt"), &self.certificate);
        replace(&dir.join("tls.key"), &self.key);
    }

    pub fn der(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.certificate.as_bytes()).unwrap()
    }
}

/// Writes a file at once, so that no reader sees half of it.
pub fn replace(path: &Path, content: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, content).unwrap();
    std::fs::rename(new, path).unwrap();
}

/// A response with its complete body.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn error(&self) -> String {
        self.json()["error"].as_str().unwrap().to_owned()
    }
}

/// Performs the TLS handshake, trusting only `ca` and presenting `client` when given.
pub async fn handshake(
    addr: SocketAddr,
    ca: &Authority,
    client: Option<&Pair>,
    alpn: &[u8],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.pem.as_bytes()).unwrap()).unwrap();
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match client {
        None => builder.with_no_client_auth(),
        Some(pair) => builder
            .with_client_auth_cert(vec![pair.der()], PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap())
            .unwrap(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    let stream = TcpStream::connect(addr).await?;
    TlsConnector::from(Arc::new(config)).connect(ServerName::try_from("localhost").unwrap(), stream).await
}

/// The certificate that the server presents to new connections.
pub async fn shown(addr: SocketAddr, ca: &Authority) -> std::io::Result<CertificateDer<'static>> {
    let stream = handshake(addr, ca, None, HTTP1).await?;
    Ok(stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned())
}

/// One connection that is kept alive.
pub enum Connection {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

impl Connection {
    pub async fn tls(
        addr: SocketAddr,
        ca: &Authority,
        client: Option<&Pair>,
        alpn: &[u8],
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let stream = handshake(addr, ca, client, alpn).await?;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(alpn));
        if alpn == HTTP2 {
            let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            return Ok(Self::Http2(sender));
        }
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Self::Http1(sender))
    }

    pub async fn plain(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self::Http1(sender)
    }

    pub async fn send(&mut self, method: &str, path: &str, body: impl Into<Bytes>) -> hyper::Result<Answer> {
        let uri = match self {
            Self::Http1(_) => path.to_owned(),
            Self::Http2(_) => format!("https://localhost{path}"),
        };
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::new(body.into()))
            .unwrap();
        let response = match self {
            Self::Http1(sender) => {
                sender.ready().await?;
                sender.send_request(request).await?
            }
            Self::Http2(sender) => {
                sender.ready().await?;
                sender.send_request(request).await?
            }
        };
        let (parts, body) = response.into_parts();
        Ok(Answer { status: parts.status, headers: parts.headers, body: body.collect().await?.to_bytes() })
    }

    pub async fn post(&mut self, path: &str, body: impl Into<Bytes>) -> Answer {
        self.send("POST", path, body).await.unwrap()
    }

    pub async fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, Bytes::new()).await.unwrap()
    }
}
