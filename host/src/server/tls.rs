//! Encryption: certificate and key from PEM files.

use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::options::TlsFiles;

/// Reads the files. What is wrong is said with the file's name.
pub fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, String> {
    let certificate = files.certificate.display();
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&files.certificate)
        .and_then(Iterator::collect)
        .map_err(|error| format!("{certificate}: {error}"))?;
    if chain.is_empty() {
        return Err(format!("{certificate}: no certificate in it"));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| format!("{}: {error}", files.key.display()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| format!("{certificate}: {error}"))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}
