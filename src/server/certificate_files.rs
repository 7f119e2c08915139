//! The certificate files, read together in one version.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};

use crate::server::certificate_error::CertificateError;
use crate::server::server_settings::ServerConfig;

/// Attempts to read files that are replaced meanwhile.
const ATTEMPTS: usize = 10;

/// Where the files are.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    pub(crate) client_ca: PathBuf,
    /// Whether the client CA is required, or optional.
    client_ca_required: bool,
    /// Required, if it is set.
    pub(crate) webhook_client_ca: Option<PathBuf>,
}

/// The content of the files.
#[derive(PartialEq, Eq)]
pub(crate) struct Files {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
    pub(crate) client_ca: Option<Vec<u8>>,
    pub(crate) webhook_client_ca: Option<Vec<u8>>,
}

impl Paths {
    pub(crate) fn new(config: &ServerConfig) -> Self {
        Self {
            certificate: config.cert_dir.join("tls.crt"),
            key: config.cert_dir.join("tls.key"),
            client_ca: config.client_ca.clone().unwrap_or_else(|| config.cert_dir.join("ca.crt")),
            client_ca_required: config.client_ca.is_some(),
            webhook_client_ca: config.webhook_client_ca.clone(),
        }
    }

    /// Reads the files. They are of one version: when the kubelet replaces a mounted Secret meanwhile, they are read again.
    pub(crate) async fn read(&self) -> Result<Files, CertificateError> {
        settled(|| self.versions(), || self.read_once()).await
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
        let webhook_client_ca = match &self.webhook_client_ca {
            Some(path) => Some(read(path).await?),
            None => None,
        };
        Ok(Files {
            certificate: read(&self.certificate).await?,
            key: read(&self.key).await?,
            client_ca,
            webhook_client_ca,
        })
    }

    /// What the kubelet's link `..data` points to in each folder: a mounted Secret is replaced by moving that link.
    async fn versions(&self) -> Vec<Option<PathBuf>> {
        let mut versions = Vec::new();
        for path in
            [Some(&self.certificate), Some(&self.client_ca), self.webhook_client_ca.as_ref()].into_iter().flatten()
        {
            versions.push(tokio::fs::read_link(path.with_file_name("..data")).await.ok());
        }
        versions
    }
}

async fn read(path: &Path) -> Result<Vec<u8>, CertificateError> {
    tokio::fs::read(path).await.map_err(|source| CertificateError::Read { path: path.to_owned(), source })
}

/// Reads until the version is the same before and after, at most [`ATTEMPTS`] times.
async fn settled<V: PartialEq, T, W: Future<Output = V>, R: Future<Output = T>>(
    version: impl Fn() -> W,
    read: impl Fn() -> R,
) -> T {
    let mut before = version().await;
    for _ in 1..ATTEMPTS {
        let content = read().await;
        let after = version().await;
        if before == after {
            return content;
        }
        before = after;
    }
    read().await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn files_that_are_replaced_during_a_read_are_read_again() {
        for (versions, wanted) in
            [(vec![1, 1], 1), (vec![1, 2, 2], 2), (vec![1, 2, 3, 3], 3), ((0..99).collect(), ATTEMPTS)]
        {
            let (looked, reads) = (Cell::new(0), Cell::new(0));
            let version = || {
                looked.set(looked.get() + 1);
                std::future::ready(versions[looked.get() - 1])
            };
            let read = || {
                reads.set(reads.get() + 1);
                std::future::ready(reads.get())
            };
            assert_eq!(settled(version, read).await, wanted, "{versions:?}");
        }
    }
}
