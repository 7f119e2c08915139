//! The HTTP client of all AWS calls, credential calls included: rustls with ring, through the proxy that `HTTPS_PROXY`, `HTTP_PROXY`
//! and `NO_PROXY` name.
//!
//! Endpoints on the node itself never go through a proxy: the instance metadata service, the EKS Pod Identity agent, and loopback
//! addresses. A proxy elsewhere would answer with the credentials of its own machine, or not at all.

use std::net::{IpAddr, Ipv6Addr};

use aws_sdk_ec2::config::SharedHttpClient;
use aws_smithy_http_client::proxy::ProxyConfig;
use aws_smithy_http_client::{Builder, Connector, tls};
use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::orchestrator::HttpRequest;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use hyper::Uri;

/// A client that uses `proxy` for every endpoint that is not on the node itself.
pub(crate) fn https(proxy: ProxyConfig) -> SharedHttpClient {
    let direct = client(ProxyConfig::disabled());
    if proxy.is_disabled() {
        return direct;
    }
    let proxied = client(proxy);
    http_client_fn(move |settings, components| {
        SharedHttpConnector::new(Routed {
            direct: direct.http_connector(settings, components),
            proxied: proxied.http_connector(settings, components),
        })
    })
}

// The SDK's builder has no setting for a proxy; its connectors have one.
fn client(proxy: ProxyConfig) -> SharedHttpClient {
    Builder::new().build_with_connector_fn(move |settings, components| {
        let mut connector = Connector::builder()
            .tls_provider(tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring))
            .proxy_config(proxy.clone());
        connector.set_connector_settings(settings.cloned());
        connector.set_sleep_impl(components.and_then(RuntimeComponents::sleep_impl));
        connector.build()
    })
}

/// Sends requests to the node itself directly, and others through the proxy.
#[derive(Debug)]
struct Routed {
    direct: SharedHttpConnector,
    proxied: SharedHttpConnector,
}

impl HttpConnector for Routed {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let connector = if is_on_node(request.uri()) { &self.direct } else { &self.proxied };
        connector.call(request)
    }
}

/// Whether a URI names an endpoint on the node itself: a loopback or link-local address, or one of `fd00:ec2::/32`, where EC2 has
/// the IPv6 addresses of the metadata service and of the Pod Identity agent.
fn is_on_node(uri: &str) -> bool {
    let Ok(uri) = uri.parse::<Uri>() else { return false };
    let host = uri.host().unwrap_or_default();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) => address.is_loopback() || address.is_link_local(),
        Ok(IpAddr::V6(address)) => address.is_loopback() || address.is_unicast_link_local() || is_of_ec2(address),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

fn is_of_ec2(address: Ipv6Addr) -> bool {
    address.segments()[..2] == [0xfd00, 0x0ec2]
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use aws_config::retry::RetryConfig;
    use aws_config::timeout::TimeoutConfig;
    use aws_config::{BehaviorVersion, Region, SdkConfig};
    use aws_sdk_ec2::config::{Credentials, SharedCredentialsProvider};
    use stowage_runtime::sync::lock;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::test_support::fake_aws;

    /// Reads the head of a request.
    async fn head(stream: &mut TcpStream) -> String {
        let mut head = Vec::new();
        let mut byte = [0; 1];
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).await.unwrap() == 1 {
            head.push(byte[0]);
        }
        String::from_utf8(head).unwrap()
    }

    /// A proxy that responds to plain requests as EC2 does, and refuses tunnels. Returns its URL and the first lines of requests.
    async fn proxy() -> (String, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&seen);
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let head = head(&mut stream).await;
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
                stream.read_exact(&mut vec![0; length.unwrap_or(0)]).await.unwrap();
                let line = head.lines().next().unwrap_or_default().to_owned();
                let (status, body) = if line.starts_with("CONNECT ") {
                    ("502 Bad Gateway", String::new())
                } else {
                    ("200 OK", fake_aws::ok("DescribeSubnets", "<subnetSet/>").unwrap().1)
                };
                lock(&record).push(line);
                let length = body.len();
                let response =
                    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
                let _ = stream.write_all(response.as_bytes()).await;
            }
        });
        (url, seen)
    }

    fn config(proxy: ProxyConfig, endpoint: Option<&str>) -> SdkConfig {
        let timeouts = TimeoutConfig::builder().operation_timeout(Duration::from_secs(20)).build();
        let config = SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("us-east-1"))
            .credentials_provider(SharedCredentialsProvider::new(Credentials::new("id", "secret", None, None, "test")))
            .retry_config(RetryConfig::disabled())
            .timeout_config(timeouts)
            .http_client(https(proxy));
        match endpoint {
            Some(url) => config.endpoint_url(url).build(),
            None => config.build(),
        }
    }

    #[tokio::test]
    async fn calls_go_through_the_proxy_and_https_in_a_tunnel() {
        let (url, seen) = proxy().await;
        let proxied = ProxyConfig::all(url).unwrap();
        let plain = aws_sdk_ec2::Client::new(&config(proxied.clone(), Some("http://ec2.test.invalid")));
        plain.describe_subnets().send().await.unwrap();
        let config = config(proxied, None);
        aws_sdk_ec2::Client::new(&config).describe_subnets().send().await.unwrap_err();
        aws_sdk_sts::Client::new(&config).get_caller_identity().send().await.unwrap_err();
        assert_eq!(
            *lock(&seen),
            [
                "POST http://ec2.test.invalid/ HTTP/1.1",
                "CONNECT ec2.us-east-1.amazonaws.com:443 HTTP/1.1",
                "CONNECT sts.us-east-1.amazonaws.com:443 HTTP/1.1",
            ]
        );
    }

    #[tokio::test]
    async fn hosts_of_no_proxy_are_called_directly() {
        let (url, seen) = proxy().await;
        let proxied = ProxyConfig::all(url).unwrap().no_proxy("10.0.0.0/8,.invalid");
        let direct = aws_sdk_ec2::Client::new(&config(proxied, Some("http://ec2.test.invalid")));
        direct.describe_subnets().send().await.unwrap_err();
        assert!(lock(&seen).is_empty(), "{seen:?}");
    }

    #[tokio::test]
    async fn endpoints_on_the_node_are_called_directly() {
        let (server, called) = proxy().await;
        let (url, seen) = proxy().await;
        let local = aws_sdk_ec2::Client::new(&config(ProxyConfig::all(url).unwrap(), Some(&server)));
        local.describe_subnets().send().await.unwrap();
        assert_eq!(*lock(&called), ["POST / HTTP/1.1"]);
        assert!(lock(&seen).is_empty(), "{seen:?}");
    }

    #[test]
    fn metadata_pod_identity_and_loopback_addresses_are_on_the_node() {
        for (uri, on_node) in [
            ("http://169.254.169.254/latest/api/token", true),
            ("http://169.254.170.23/v1/credentials", true),
            ("http://169.254.170.2/v2/credentials", true),
            ("http://[fd00:ec2::254]/latest/api/token", true),
            ("http://[fd00:ec2::23]/v1/credentials", true),
            ("http://[fe80::1]/", true),
            ("http://127.0.0.1:5000/", true),
            ("http://[::1]:5000/", true),
            ("http://localhost:4566/", true),
            ("https://ec2.us-east-1.amazonaws.com/", false),
            ("https://10.0.0.1/", false),
            ("https://[fd00::1]/", false),
            ("https://169.254.169.254.example.com/", false),
            ("not a uri", false),
        ] {
            assert_eq!(is_on_node(uri), on_node, "{uri}");
        }
    }
}
