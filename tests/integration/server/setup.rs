//! A server under test, and request bodies.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use stowage::parts::{AppState, BoundAddrs, Hold, NodeRoom, Server, ServerConfig, View, ViewInput};
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_model::units::Millicores;
use stowage_runtime::clock::now;
use stowage_runtime::telemetry::Metrics;
use tempfile::TempDir;

use super::wire::{Authority, Connection, HTTP1, Pair};

/// A running server, its authority, and a client certificate that it accepts.
pub struct Setup {
    pub ca: Authority,
    pub client: Pair,
    pub serving: Pair,
    pub dir: TempDir,
    pub state: Arc<AppState>,
    pub server: Server,
}

impl Setup {
    pub async fn start(edit: impl FnOnce(&mut ServerConfig)) -> Self {
        Self::start_with_clock(now, edit).await
    }

    pub async fn start_with_clock(now: fn() -> UnixMillis, edit: impl FnOnce(&mut ServerConfig)) -> Self {
        let (ca, dir) = (Authority::new(), TempDir::new().unwrap());
        let serving = ca.server();
        serving.write(dir.path());
        std::fs::write(dir.path().join("ca.crt"), &ca.pem).unwrap();
        let mut config = config(&dir);
        edit(&mut config);
        let state = Arc::new(AppState::new(Metrics::new(), now));
        let server = Server::start(config, Arc::clone(&state)).await.unwrap();
        Self { client: ca.client(), ca, serving, dir, state, server }
    }

    pub fn addrs(&self) -> BoundAddrs {
        self.server.addrs()
    }

    pub async fn connect(&self, client: Option<&Pair>) -> Connection {
        Connection::tls(self.addrs().https, &self.ca, client, HTTP1).await.unwrap()
    }

    pub async fn metrics(&self) -> String {
        let answer = Connection::plain(self.addrs().metrics.unwrap()).await.get("/metrics").await;
        assert!(answer.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
        String::from_utf8(answer.body.to_vec()).unwrap()
    }

    pub async fn metric(&self, line: &str) -> Option<String> {
        let text = self.metrics().await;
        text.lines().find_map(|have| have.strip_prefix(line).map(|value| value.trim().to_owned()))
    }
}

pub fn config(dir: &TempDir) -> ServerConfig {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    ServerConfig {
        https_addr: any,
        metrics_addr: Some(any),
        health_addr: Some(any),
        drain_timeout: Duration::from_secs(5),
        // Tests of certificate rotation set a shorter interval.
        cert_poll: Duration::from_hours(1),
        ..ServerConfig::new(dir.path())
    }
}

pub fn ask(names: &[&str]) -> String {
    let pod = json!({
        "metadata": {"name": "p", "namespace": "default"},
        "spec": {"containers": [{"resources": {"requests": {"cpu": "1"}}}]}, "status": {}
    });
    json!({"Pod": pod, "Nodes": null, "NodeNames": names}).to_string()
}

pub fn review() -> String {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "U", "resource": {"group": "", "version": "v1", "resource": "pods"}, "operation": "CREATE", "namespace": "default",
            "object": {"metadata": {"generateName": "p-"}, "spec": {"nodeSelector": {"beta.kubernetes.io/os": "linux"}}}
        }
    })
    .to_string()
}

/// Node `held` is full of holds, node `free` is not.
pub fn held_view(now: UnixMillis) -> View {
    let room = Resources { cpu: Millicores(1000), pods: 10, ..Resources::default() };
    let hold = Hold {
        pod: "default/q".into(),
        requests: room.clone(),
        expires_at: now + Duration::from_mins(10),
        ..Hold::default()
    };
    let node = |name: &str, holds: Vec<Hold>| NodeRoom {
        name: name.into(),
        allocatable: room.clone(),
        free: room.clone(),
        holds,
        ..NodeRoom::default()
    };
    View::build(ViewInput {
        as_of: now,
        max_age: Duration::from_mins(10),
        nodes: vec![node("held", vec![hold]), node("free", vec![])],
        planned: std::collections::BTreeMap::new(),
    })
}
