//! Which routes a client certificate opens: by the CA that signed it, and by its names.

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use x509_parser::extensions::GeneralName;

/// Maximum length of the presented names in an answer, in characters.
const MAX_NAMES_CHARS: usize = 200;

/// What the certificate of a connection means to a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Granted,
    /// No certificate, or none that the CA of the route signed.
    NoCertificate,
    /// A certificate of the CA, for none of the names of the route: these are its names.
    OtherName(Arc<str>),
}

/// Access of one connection to the routes for which its handshake decides.
#[derive(Clone, Debug)]
pub(crate) struct Accesses {
    pub(crate) extender: Access,
    pub(crate) webhook: Access,
}

/// The clients of all routes.
#[derive(Debug)]
pub(crate) struct Clients {
    /// Without a CA the extender is closed.
    pub(crate) extender: Option<RouteClients>,
    /// Without a CA the webhook is open: most API servers present no certificate.
    pub(crate) webhook: Option<RouteClients>,
    /// Of the CA of the extender; without it the state is closed.
    pub(crate) debug: Option<RouteClients>,
}

impl Clients {
    /// The access of a connection whose peer presented this chain, which is empty without a certificate.
    pub(crate) fn accesses(&self, chain: &[CertificateDer<'_>]) -> Accesses {
        Accesses {
            extender: self.extender.as_ref().map_or(Access::NoCertificate, |clients| clients.access(chain)),
            webhook: self.webhook.as_ref().map_or(Access::Granted, |clients| clients.access(chain)),
        }
    }

    /// The access to the state of a peer that presented this chain.
    pub(crate) fn access_to_state(&self, chain: &[CertificateDer<'_>]) -> Access {
        self.debug.as_ref().map_or(Access::NoCertificate, |clients| clients.access(chain))
    }
}

/// The clients of one route.
#[derive(Debug)]
pub(crate) struct RouteClients {
    pub(crate) verifier: Arc<dyn ClientCertVerifier>,
    pub(crate) names: Vec<String>,
}

impl RouteClients {
    fn access(&self, chain: &[CertificateDer<'_>]) -> Access {
        let Some((leaf, intermediates)) = chain.split_first() else { return Access::NoCertificate };
        if self.verifier.verify_client_cert(leaf, intermediates, UnixTime::now()).is_err() {
            return Access::NoCertificate;
        }
        let presented = names(leaf);
        if presented.iter().any(|name| self.names.contains(name)) {
            return Access::Granted;
        }
        Access::OtherName(presented.join(", ").chars().take(MAX_NAMES_CHARS).collect::<String>().into())
    }
}

/// The common names, DNS names and URIs of a certificate.
fn names(leaf: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, certificate)) = x509_parser::parse_x509_certificate(leaf) else { return Vec::new() };
    let mut names: Vec<String> =
        certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok()).map(str::to_owned).collect();
    if let Ok(Some(alternatives)) = certificate.subject_alternative_name() {
        names.extend(alternatives.value.general_names.iter().filter_map(|name| match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
            _ => None,
        }));
    }
    names
}
