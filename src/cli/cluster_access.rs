//! Access to the cluster.

use kube::Config;
use kube::config::InferConfigError;

/// The configuration of a pod's service account or of a kubeconfig. `HTTPS_PROXY` is for AWS: the API server is called directly, as in a
/// pod, unless the kubeconfig names a proxy.
pub(crate) async fn config() -> Result<Config, InferConfigError> {
    let of_environment = ["HTTPS_PROXY", "https_proxy"].map(|name| std::env::var(name).unwrap_or_default());
    let mut config = Config::infer().await?;
    let proxy = config.proxy_url.as_ref();
    // kube gives no other hint at where it found the proxy.
    if of_environment.iter().any(|url| url.parse().ok().as_ref() == proxy && proxy.is_some()) {
        config.proxy_url = None;
    }
    Ok(config)
}
