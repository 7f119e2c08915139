//! The in-process server over real TLS on loopback.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use futures::{StreamExt, stream};
use serde_json::json;
use stowage::parts::{AppState, Server, ServerError, Shutdown};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock::now;
use stowage_runtime::telemetry::Metrics;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use setup::{Setup, ask, config, held_view, review};
use wire::{Authority, Connection, HTTP1, HTTP2, Pair, handshake, replace, shown};

mod setup;
mod wire;

#[tokio::test]
async fn the_extender_needs_a_client_certificate_and_the_webhook_does_not() {
    let setup = Setup::start(|_| {}).await;
    let mut stranger = setup.connect(None).await;
    for verb in ["/v1/filter", "/v1/prioritize", "/v1/preempt"] {
        let refused = stranger.post(verb, ask(&["a"])).await;
        assert_eq!(refused.status, 403, "{verb}");
        assert!(refused.error().contains("client certificate"), "{}", refused.error());
    }
    assert_eq!(stranger.post("/mutate?timeout=2s", review()).await.status, 200);
    let mut scheduler = setup.connect(Some(&setup.client)).await;
    for verb in ["/v1/filter", "/v1/prioritize", "/v1/preempt"] {
        assert_eq!(scheduler.post(verb, ask(&["a"])).await.status, 200, "{verb}");
    }
    assert_eq!(
        setup.metric("stowage_extender_requests_total{code=\"403\",verb=\"filter\"}").await.as_deref(),
        Some("1")
    );
    assert_eq!(
        setup.metric("stowage_extender_requests_total{code=\"200\",verb=\"filter\"}").await.as_deref(),
        Some("1")
    );
    assert_eq!(setup.metric("stowage_webhook_requests_total{result=\"patched\"}").await.as_deref(), Some("1"));
}

#[tokio::test]
async fn a_client_certificate_of_another_authority_fails_the_handshake() {
    let setup = Setup::start(|_| {}).await;
    for wrong in [Authority::new().client(), setup.serving.clone()] {
        // In TLS 1.3 the client gets the alert with its first read.
        let failed = match Connection::tls(setup.addrs().https, &setup.ca, Some(&wrong), HTTP1).await {
            Ok(mut connection) => connection.send("POST", "/mutate", review()).await.is_err(),
            Err(_) => true,
        };
        assert!(failed, "neither the extender nor the webhook may be reached");
    }
    assert_eq!(setup.connect(None).await.post("/mutate", review()).await.status, 200, "the service keeps running");
}

#[tokio::test]
async fn the_extender_accepts_the_names_of_the_scheduler_only() {
    let setup = Setup::start(|config| {
        config.extender_client_names = vec!["stowage-scheduler".into(), "system:kube-scheduler".into()];
    })
    .await;
    for accepted in [setup.ca.client(), setup.ca.client_with_common_name("system:kube-scheduler")] {
        assert_eq!(setup.connect(Some(&accepted)).await.post("/v1/filter", ask(&["a"])).await.status, 200);
    }
    for (name, other) in [
        ("workload", setup.ca.client_of("workload")),
        ("stowage-scheduler.evil", setup.ca.client_of("stowage-scheduler.evil")),
        ("system:node:n", setup.ca.client_with_common_name("system:node:n")),
    ] {
        let mut connection = setup.connect(Some(&other)).await;
        let refused = connection.post("/v1/prioritize", ask(&["a"])).await;
        assert_eq!(refused.status, 403, "{name}");
        let error = refused.error();
        assert!(error.contains(name) && error.contains("--extender-client-names"), "{error}");
        assert_eq!(connection.post("/mutate", review()).await.status, 200, "the webhook asks for no certificate");
    }
}

#[tokio::test]
async fn with_a_client_ca_the_webhook_accepts_the_api_server_only() {
    let webhook = Authority::new();
    let setup = Setup::start(|config| {
        let path = config.cert_dir.join("api-server.crt");
        std::fs::write(&path, &webhook.pem).unwrap();
        config.webhook_client_ca = Some(path);
    })
    .await;
    let (api_server, other) = (webhook.client_of("kube-apiserver"), webhook.client_of("stowage-scheduler"));
    for (case, client, mutate, filter, advice) in [
        ("no certificate", None, 403, 403, "--webhook-client-ca"),
        ("the API server", Some(&api_server), 200, 403, ""),
        ("another name", Some(&other), 403, 403, "--webhook-client-names"),
        ("the scheduler, of its own CA", Some(&setup.client), 403, 200, "--webhook-client-ca"),
        (
            "the API server's name, of the CA of the scheduler",
            Some(&setup.ca.client_of("kube-apiserver")),
            403,
            403,
            "",
        ),
    ] {
        let mut connection = setup.connect(client).await;
        let answer = connection.post("/mutate", review()).await;
        assert_eq!(answer.status, mutate, "{case}");
        if !advice.is_empty() {
            assert!(answer.error().contains(advice), "{case}: {}", answer.error());
        }
        assert_eq!(connection.post("/v1/filter", ask(&["a"])).await.status, filter, "{case}");
        assert_eq!(connection.get("/livez").await.status, 200, "{case}");
    }
    let operator = webhook.client_of("stowage-debug");
    let refused = setup.connect(Some(&operator)).await.get("/debug/state").await;
    assert_eq!(refused.status, 403, "the state belongs to the CA of the extender");
    assert!(setup.metric("stowage_cert_expiry_seconds{certificate=\"webhook_client_ca\"}").await.is_some());
}

#[tokio::test]
async fn the_expiry_of_an_intermediate_is_reported() {
    let ca = Authority::new();
    let setup = Setup::start(|config| ca.server_with_expiring_intermediate().write(&config.cert_dir)).await;
    setup.state.readiness.set_caches_synced(true);
    let seconds = setup.metric("stowage_cert_expiry_seconds{certificate=\"serving\"}").await.unwrap();
    assert!((80_000.0..=86_400.0).contains(&seconds.parse::<f64>().unwrap()), "{seconds}");
}

#[tokio::test]
async fn without_a_client_ca_the_extender_is_closed() {
    let setup = Setup::start(|config| std::fs::remove_file(config.cert_dir.join("ca.crt")).unwrap()).await;
    assert_eq!(setup.connect(Some(&setup.client)).await.post("/v1/filter", ask(&["a"])).await.status, 403);
    assert_eq!(setup.connect(None).await.post("/mutate", review()).await.status, 200);
}

#[tokio::test]
async fn verdicts_use_the_stored_view() {
    let setup = Setup::start(|_| {}).await;
    let mut scheduler = setup.connect(Some(&setup.client)).await;
    let names = |answer: &wire::Answer| answer.json()["NodeNames"].clone();
    assert_eq!(names(&scheduler.post("/v1/filter", ask(&["held", "free"])).await), json!(["held", "free"]));
    setup.state.view.store(Arc::new(held_view(now())));
    let judged = scheduler.post("/v1/filter", ask(&["held", "free"])).await;
    assert_eq!(
        judged.json(),
        json!({
            "Nodes": null, "NodeNames": ["free"], "FailedNodes": {},
            "FailedAndUnresolvableNodes": {"held": "room reserved for 1 planned pod"}, "Error": ""
        })
    );
    let scored = scheduler.post("/v1/prioritize", ask(&["held", "free"])).await;
    assert_eq!(scored.json()[1], json!({"Host": "free", "Score": 9}));
    assert_eq!(setup.metric("stowage_filter_denied_total{reason=\"room_reserved\"}").await.as_deref(), Some("1"));
    assert_eq!(setup.metric("stowage_extender_stale_total").await.as_deref(), Some("1"));
}

#[tokio::test]
async fn responses_are_complete_and_connections_stay_open_over_http_1_and_2() {
    let setup = Setup::start(|_| {}).await;
    for alpn in [HTTP1, HTTP2] {
        let mut connection = Connection::tls(setup.addrs().https, &setup.ca, Some(&setup.client), alpn).await.unwrap();
        for _ in 0..3 {
            for (path, body, status) in [
                ("/v1/filter", ask(&["a"]), 200),
                ("/v1/filter", "{".to_owned(), 400),
                ("/mutate", review(), 200),
                ("/nowhere", String::new(), 404),
            ] {
                let answer = connection.post(path, body).await;
                assert_eq!(answer.status, status);
                assert_eq!(answer.headers["content-length"], answer.body.len().to_string());
                assert_eq!(answer.headers["content-type"], "application/json");
                assert!(
                    !answer.headers.contains_key("transfer-encoding") && !answer.headers.contains_key("connection")
                );
            }
        }
    }
}

#[tokio::test]
async fn malformed_bodies_get_400_with_the_reason() {
    let setup = Setup::start(|_| {}).await;
    let mut scheduler = setup.connect(Some(&setup.client)).await;
    let deep = "[".repeat(50_000);
    for (path, body, message) in [
        ("/v1/filter", "", "the body is no ExtenderArgs: EOF"),
        ("/v1/filter", "not json", "the body is no ExtenderArgs: expected ident"),
        ("/v1/filter", "{}", "the body is no ExtenderArgs: missing field `Pod`"),
        ("/v1/filter", "{\"Pod\":{},\"NodeNames\":{}}", "the body is no ExtenderArgs: invalid type: map"),
        ("/v1/prioritize", "[1]", "the body is no ExtenderArgs: invalid"),
        ("/v1/preempt", "{}", "the body is no ExtenderPreemptionArgs: missing field `Pod`"),
        ("/v1/filter", &deep, "the body is no ExtenderArgs"),
        ("/mutate", "", "the body is no AdmissionReview"),
        ("/mutate", "{}", "not admission.k8s.io/v1 AdmissionReview"),
        ("/mutate", &deep, "the body is no AdmissionReview: recursion limit exceeded"),
    ] {
        let answer = scheduler.post(path, body.to_owned()).await;
        assert_eq!(answer.status, 400, "{path}");
        assert!(answer.error().contains(message), "{path}: {}", answer.error());
    }
    assert_eq!(scheduler.post("/v1/filter", ask(&["a"])).await.status, 200);
    assert_eq!(scheduler.send("GET", "/v1/filter", "").await.unwrap().status, 405);
}

#[tokio::test]
async fn bodies_over_the_limit_get_413() {
    let setup = Setup::start(|config| {
        config.extender.body = 3 << 20;
        config.webhook.body = 1000;
    })
    .await;
    for (path, bytes, status) in [
        ("/v1/filter", (3 << 20) + 1, 413),
        ("/v1/filter", 3 << 20, 400),
        ("/mutate", 1001, 413),
        ("/mutate", 1000, 400),
    ] {
        let answer = setup.connect(Some(&setup.client)).await.post(path, vec![b' '; bytes]).await;
        assert_eq!(answer.status, status, "{path} {bytes}");
        assert!(!answer.error().is_empty());
    }
    let many: Vec<String> = (0..100_000).map(|n| format!("ip-10-0-0-{n}.ec2.internal")).collect();
    let names: Vec<&str> = many.iter().map(String::as_str).collect();
    let large = setup.connect(Some(&setup.client)).await.post("/v1/filter", ask(&names)).await;
    assert_eq!(large.json()["NodeNames"].as_array().unwrap().len(), 100_000);
}

#[tokio::test]
async fn a_rotated_certificate_is_presented_to_new_connections_only() {
    let setup = Setup::start(|config| config.cert_poll = Duration::from_millis(5)).await;
    let addr = setup.addrs().https;
    let mut open = setup.connect(Some(&setup.client)).await;
    assert_eq!(shown(addr, &setup.ca).await.unwrap(), setup.serving.der());

    // The two files are not written atomically: with the new certificate and the old key, the old pair stays in use.
    let new = setup.ca.server();
    replace(&setup.dir.path().join("tls.crt"), &new.certificate);
    while setup.metric("stowage_cert_reloads_total{result=\"error\"}").await.as_deref() == Some("0") {
        assert_eq!(shown(addr, &setup.ca).await.unwrap(), setup.serving.der());
    }
    replace(&setup.dir.path().join("tls.key"), &new.key);
    let turned = async {
        while shown(addr, &setup.ca).await.unwrap() != new.der() {
            assert_eq!(open.post("/v1/filter", ask(&["a"])).await.status, 200);
        }
    };
    tokio::time::timeout(Duration::from_secs(30), turned).await.expect("the new certificate is presented eventually");
    assert_eq!(open.post("/v1/filter", ask(&["a"])).await.status, 200);
    assert_eq!(setup.metric("stowage_cert_reloads_total{result=\"ok\"}").await.as_deref(), Some("1"));
    assert_eq!(
        setup.metric("stowage_cert_reloads_total{result=\"error\"}").await.as_deref(),
        Some("1"),
        "reported once"
    );
}

/// A service whose certificates are in the kubelet's layout: files are links into ..data, which is a link to a directory that is replaced.
async fn with_mounted_secret() -> Setup {
    Setup::start(|config| {
        let dir = &config.cert_dir;
        std::fs::create_dir(dir.join("..first")).unwrap();
        for file in ["tls.crt", "tls.key", "ca.crt"] {
            std::fs::rename(dir.join(file), dir.join("..first").join(file)).unwrap();
            std::os::unix::fs::symlink(format!("..data/{file}"), dir.join(file)).unwrap();
        }
        std::os::unix::fs::symlink("..first", dir.join("..data")).unwrap();
    })
    .await
}

/// Writes a version of a mounted Secret, without switching to it.
fn write_version(dir: &Path, version: &str, identity: &Pair, ca: &str) {
    let folder = dir.join(version);
    std::fs::create_dir(&folder).unwrap();
    identity.write(&folder);
    std::fs::write(folder.join("ca.crt"), ca).unwrap();
}

fn switch_to(dir: &Path, version: &str) {
    std::os::unix::fs::symlink(version, dir.join("..data_tmp")).unwrap();
    std::fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
}

#[tokio::test]
async fn a_mounted_secret_is_followed_through_its_data_link() {
    let setup = with_mounted_secret().await;
    let certificates = setup.server.certificates();
    assert!(!certificates.reload().await.unwrap(), "nothing changed");
    let (dir, new) = (setup.dir.path(), setup.ca.server());
    write_version(dir, "..second", &new, &setup.ca.pem);
    switch_to(dir, "..second");
    assert!(certificates.reload().await.unwrap());
    assert_eq!(shown(setup.addrs().https, &setup.ca).await.unwrap(), new.der());
}

#[tokio::test]
async fn a_read_during_a_switch_of_the_mounted_secret_gets_one_version() {
    let setup = with_mounted_secret().await;
    let dir = setup.dir.path().to_owned();
    write_version(&dir, "..second", &setup.ca.server(), &setup.ca.pem);
    let mut failures = Vec::new();
    for round in 0..500 {
        let (dir, version) = (dir.clone(), if round % 2 == 0 { "..second" } else { "..first" });
        // One switch per read, at another moment of it each time.
        let switching = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(round));
            switch_to(&dir, version);
        });
        failures.extend(setup.server.certificates().reload().await.err());
        switching.join().unwrap();
    }
    assert!(failures.is_empty(), "{} of 500 reads mixed two versions, such as: {}", failures.len(), failures[0]);
}

#[tokio::test]
async fn a_new_client_ca_replaces_the_old_client_ca() {
    let clients = Authority::new();
    let setup = Setup::start(|config| {
        let path = config.cert_dir.join("clients.crt");
        std::fs::write(&path, &clients.pem).unwrap();
        config.client_ca = Some(path);
    })
    .await;
    assert_eq!(setup.connect(Some(&clients.client())).await.post("/v1/filter", ask(&["a"])).await.status, 200);
    let next = Authority::new();
    std::fs::write(setup.dir.path().join("clients.crt"), &next.pem).unwrap();
    assert!(setup.server.certificates().reload().await.unwrap());
    assert_eq!(setup.connect(Some(&next.client())).await.post("/v1/filter", ask(&["a"])).await.status, 200);
    let old = Connection::tls(setup.addrs().https, &setup.ca, Some(&clients.client()), HTTP1).await;
    let refused = match old {
        Ok(mut connection) => connection.send("POST", "/v1/filter", ask(&["a"])).await.is_err(),
        Err(_) => true,
    };
    assert!(refused);
    std::fs::write(setup.dir.path().join("clients.crt"), "no pem").unwrap();
    let error = setup.server.certificates().reload().await.unwrap_err();
    assert!(error.to_string().ends_with("clients.crt holds no certificate in PEM form"), "{error}");
    assert_eq!(setup.connect(Some(&next.client())).await.post("/v1/filter", ask(&["a"])).await.status, 200);
}

static BROKEN_CLOCK: AtomicBool = AtomicBool::new(false);

#[tokio::test]
async fn a_panic_in_a_handler_gets_500_and_the_service_keeps_running() {
    let clock = || {
        assert!(!BROKEN_CLOCK.load(Ordering::SeqCst), "the clock of this test panics on purpose");
        now()
    };
    let setup = Setup::start_with_clock(clock, |_| {}).await;
    let mut scheduler = setup.connect(Some(&setup.client)).await;
    BROKEN_CLOCK.store(true, Ordering::SeqCst);
    let failed = scheduler.post("/v1/filter", ask(&["a"])).await;
    let large = scheduler.post("/v1/filter", format!("{}{}", ask(&["a"]), " ".repeat(2 << 20))).await;
    BROKEN_CLOCK.store(false, Ordering::SeqCst);
    for answer in [failed, large] {
        assert_eq!((answer.status.as_u16(), answer.error().as_str()), (500, "internal error"));
    }
    assert_eq!(scheduler.post("/v1/filter", ask(&["a"])).await.status, 200);
    assert_eq!(setup.metric("stowage_handler_panics_total").await.as_deref(), Some("2"));
}

#[tokio::test]
async fn liveness_and_readiness_are_separate_probes() {
    let setup = Setup::start(|_| {}).await;
    let mut health = Connection::plain(setup.addrs().health.unwrap()).await;
    let mut https = setup.connect(None).await;
    for connection in [&mut health, &mut https] {
        assert_eq!(connection.get("/livez").await.status, 200);
        assert_eq!(connection.get("/healthz").await.status, 200);
        let unready = connection.get("/readyz").await;
        assert_eq!((unready.status.as_u16(), &unready.body[..]), (503, &b"watch caches are not synced\n"[..]));
    }
    assert_eq!(setup.metric("stowage_ready").await.as_deref(), Some("0"));
    setup.state.readiness.set_caches_synced(true);
    assert_eq!(health.get("/readyz").await.status, 200);
    assert_eq!(https.get("/readyz").await.status, 200);
    assert_eq!(setup.metric("stowage_ready").await.as_deref(), Some("1"));
    let seconds: f64 =
        setup.metric("stowage_cert_expiry_seconds{certificate=\"serving\"}").await.unwrap().parse().unwrap();
    assert!(seconds > 86_400.0, "{seconds}");
    assert_eq!(health.get("/metrics").await.status, 404, "each listener serves its own paths");
    assert_eq!(health.post("/mutate", review()).await.status, 404);
}

#[tokio::test]
async fn series_that_no_collector_keeps_follow_the_others_in_parts() {
    let setup = Setup::start(|_| {}).await;
    let mut scraper = Connection::plain(setup.addrs().metrics.unwrap()).await;
    assert!(scraper.get("/metrics").await.headers.contains_key("content-length"), "of a replica that does not lead");
    // Larger than what is handed over at a time, and nothing in between.
    let parts = ["a 1\n".to_owned(), String::new(), "b 2\n".repeat(40_000), "c 3\n".to_owned()];
    let all = parts.concat();
    let parts = parts.map(Bytes::from);
    setup.state.series.set_source(move || stream::iter(parts.clone()).boxed());
    for _ in 0..2 {
        let answer = scraper.get("/metrics").await;
        assert_eq!(answer.status, 200);
        let text = String::from_utf8(answer.body.to_vec()).unwrap();
        assert!(text.contains("\nstowage_ready ") && text.ends_with(&all), "{}", text.len());
    }
}

/// Sends a request head that announces more body than follows.
async fn half_a_request(setup: &Setup, body: &str) -> tokio_rustls::client::TlsStream<tokio::net::TcpStream> {
    let mut stream = handshake(setup.addrs().https, &setup.ca, None, HTTP1).await.unwrap();
    let head = format!("POST /mutate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&body.as_bytes()[..body.len() / 2]).await.unwrap();
    stream.flush().await.unwrap();
    stream
}

#[tokio::test]
async fn a_body_that_never_ends_gets_408() {
    let setup = Setup::start(|config| config.request_timeout = Duration::from_millis(50)).await;
    let mut stream = half_a_request(&setup, &review()).await;
    let mut answer = vec![0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 408");
}

/// Whether the server ends a connection that sends nothing more.
async fn ends(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> bool {
    let mut rest = Vec::new();
    tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut rest)).await.is_ok()
}

#[tokio::test]
async fn a_loop_that_is_stuck_fails_liveness_with_its_name() {
    let setup = Setup::start(|_| {}).await;
    let mut health = Connection::plain(setup.addrs().health.unwrap()).await;
    let stuck = setup.state.heartbeats.run("drift", Duration::from_millis(1), std::future::pending::<()>());
    let stuck = tokio::spawn(stuck);
    let dead = tokio::time::timeout(Duration::from_secs(30), async {
        loop {
            let answer = health.get("/livez").await;
            if answer.status != 200 {
                return answer;
            }
        }
    });
    let dead = dead.await.expect("it fails");
    let body = String::from_utf8_lossy(&dead.body[..]).into_owned();
    assert_eq!(dead.status, 503);
    assert!(body.starts_with("loop drift is stuck: no progress for "), "{body}");
    stuck.abort();
    assert!(stuck.await.unwrap_err().is_cancelled());
    assert_eq!(health.get("/livez").await.status, 200);
}

#[tokio::test]
async fn silent_connections_give_way_to_probes_and_reviews() {
    let setup = Setup::start(|config| config.connections.connections = 4).await;
    let health = setup.addrs().health.unwrap();
    let mut silent = Vec::new();
    for _ in 0..8 {
        silent.push(tokio::net::TcpStream::connect(health).await.unwrap());
        // A connection counts once it is accepted, which the answer to a later one proves.
        assert_eq!(Connection::plain(health).await.get("/livez").await.status, 200);
    }
    let mut sessions = Vec::new();
    for _ in 0..8 {
        sessions.push(handshake(setup.addrs().https, &setup.ca, None, HTTP2).await.unwrap());
        assert_eq!(setup.connect(None).await.post("/mutate", review()).await.status, 200);
    }
    assert!(ends(&mut silent[0]).await && ends(&mut sessions[0]).await, "the oldest are closed");
    let closed = setup.metric("stowage_connections_closed_total{listener=\"health\",reason=\"evicted\"}").await;
    assert!(closed.is_some_and(|closed| closed.parse::<u32>().unwrap() >= 4));
}

#[tokio::test]
async fn a_connection_must_start_a_request_in_time() {
    let setup = Setup::start(|config| config.connections.first_request = Duration::from_millis(1)).await;
    let mut silent = tokio::net::TcpStream::connect(setup.addrs().health.unwrap()).await.unwrap();
    let mut session = handshake(setup.addrs().https, &setup.ca, None, HTTP1).await;
    assert!(ends(&mut silent).await);
    if let Ok(session) = &mut session {
        assert!(ends(session).await);
    }
}

#[tokio::test]
async fn bodies_of_one_peer_are_bounded_in_sum_and_the_extender_is_not_affected() {
    let setup = Setup::start(|config| {
        config.webhook.bytes_per_peer = 3 * review().len() / 2;
    })
    .await;
    let (first, _second) = (half_a_request(&setup, &review()).await, half_a_request(&setup, &review()).await);
    let mut refused = setup.connect(None).await.post("/mutate", review()).await;
    // Until the server has read both halves.
    while refused.status == 200 {
        refused = setup.connect(None).await.post("/mutate", review()).await;
    }
    assert_eq!((refused.status.as_u16(), &refused.headers["retry-after"]), (429, &"1".parse().unwrap()));
    assert_eq!(refused.error(), "too many bytes of requests in progress");
    assert_eq!(setup.connect(Some(&setup.client)).await.post("/v1/filter", ask(&["a"])).await.status, 200);
    assert_eq!(setup.connect(None).await.get("/readyz").await.status, 503, "probes need no share");
    drop(first);
    while setup.connect(None).await.post("/mutate", review()).await.status != 200 {}
}

#[tokio::test]
async fn open_requests_are_answered_before_it_stops() {
    let setup = Setup::start(|_| {}).await;
    let (addrs, body) = (setup.addrs(), review());
    let mut stream = half_a_request(&setup, &body).await;
    while setup.metric("stowage_requests_in_flight").await.as_deref() != Some("1") {}
    let Setup { server, state, ca, .. } = setup;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(server.run_until(async {
        let _ = stopped.await;
        Shutdown::Stop
    }));
    stop.send(()).unwrap();
    while state.readiness.missing(UnixMillis(0)).last() != Some(&"shutting down") {
        tokio::task::yield_now().await;
    }
    stream.write_all(&body.as_bytes()[body.len() / 2..]).await.unwrap();
    // The server closes the connection after the response; the kind of TLS close is not tested here.
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes).await;
    let answer = String::from_utf8_lossy(&bytes);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"allowed\":true"), "{answer}");
    running.await.unwrap().unwrap();
    assert!(handshake(addrs.https, &ca, None, HTTP1).await.is_err());
}

#[tokio::test]
async fn a_request_that_never_ends_delays_no_restart() {
    let setup = Setup::start(|config| config.drain_timeout = Duration::from_mins(1)).await;
    let _open = half_a_request(&setup, &review()).await;
    while setup.metric("stowage_requests_in_flight").await.as_deref() != Some("1") {}
    let begin = std::time::Instant::now();
    setup.server.run_until(async { Shutdown::Restart }).await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn unusable_certificates_and_addresses_fail_the_start_with_the_reason() {
    let state = || Arc::new(AppState::new(Metrics::new(), now));
    let ca = Authority::new();
    let refused = async |edit: &dyn Fn(&std::path::Path)| {
        let dir = TempDir::new().unwrap();
        ca.server().write(dir.path());
        edit(dir.path());
        let error = Server::start(config(&dir), state()).await.map(|_| ()).unwrap_err();
        assert!(matches!(error, ServerError::Certificate(_)));
        error.to_string().replace(&format!("{}/", dir.path().display()), "")
    };
    assert_eq!(
        refused(&|dir| std::fs::remove_file(dir.join("tls.key")).unwrap()).await,
        "can't read tls.key: No such file or directory (os error 2); mount the certificate's Secret there"
    );
    assert_eq!(
        refused(&|dir| std::fs::write(dir.join("tls.key"), ca.server().key).unwrap()).await,
        "the key in tls.key does not belong to the certificate in tls.crt; replace both together"
    );
    assert_eq!(
        refused(&|dir| std::fs::write(dir.join("tls.crt"), "").unwrap()).await,
        "tls.crt holds no certificate in PEM form"
    );
    assert_eq!(
        refused(&|dir| std::fs::write(dir.join("tls.key"), &ca.pem).unwrap()).await,
        "tls.key holds no private key in PEM form"
    );
    assert!(
        refused(&|dir| std::fs::write(
            dir.join("ca.crt"),
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        )
        .unwrap())
        .await
        .starts_with("ca.crt can't be used: ")
    );

    let dir = TempDir::new().unwrap();
    ca.server().write(dir.path());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = config(&dir);
    config.health_addr = Some(taken.local_addr().unwrap());
    let error = Server::start(config, state()).await.map(|_| ()).unwrap_err().to_string();
    assert!(error.starts_with("can't listen on 127.0.0.1:") && error.contains(" for health: "), "{error}");
}

#[tokio::test]
async fn the_state_needs_the_certificate_of_an_operator() {
    let setup = Setup::start(|_| {}).await;
    let operator = setup.ca.client_of("stowage-debug");
    let mut connection = setup.connect(Some(&operator)).await;
    assert_eq!(connection.get("/debug/state").await.status, 503, "no source yet");
    setup.state.debug.set_source(|| json!({"leading": false}).to_string().into());
    for (case, client, status, advice) in [
        ("no certificate", None, 403, "--debug-client-names"),
        ("the scheduler", Some(&setup.client), 403, "stowage-scheduler may not read the state"),
        ("an operator", Some(&operator), 200, ""),
    ] {
        let mut connection = setup.connect(client).await;
        for path in ["/debug/state", "/debug/state?full"] {
            let answer = connection.get(path).await;
            assert_eq!(answer.status, status, "{case}");
            if status == 200 {
                assert_eq!(answer.headers["content-type"], "application/json");
                assert_eq!(answer.headers["cache-control"], "no-store");
                assert_eq!(answer.json(), json!({"leading": false}));
            } else {
                assert!(answer.error().contains(advice), "{case}: {}", answer.error());
            }
        }
        assert_eq!(connection.get("/livez").await.status, 200, "{case}");
    }
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        assert_eq!(connection.send(method, "/debug/state", "{}").await.unwrap().status, 405, "{method}");
    }
    assert_eq!(connection.post("/v1/filter", ask(&["a"])).await.status, 403, "an operator is no scheduler");
    for plain in [setup.addrs().metrics, setup.addrs().health] {
        assert_eq!(Connection::plain(plain.unwrap()).await.get("/debug/state").await.status, 404);
    }
}

#[tokio::test]
async fn an_open_connection_reads_the_state_no_longer_than_its_certificate_is_accepted() {
    let setup = Setup::start(|_| {}).await;
    setup.state.debug.set_source(|| b"{}".to_vec());
    let mut connection = setup.connect(Some(&setup.ca.client_of("stowage-debug"))).await;
    assert_eq!(connection.get("/debug/state").await.status, 200);
    std::fs::write(setup.dir.path().join("ca.crt"), &Authority::new().pem).unwrap();
    assert!(setup.server.certificates().reload().await.unwrap());
    assert_eq!(connection.get("/debug/state").await.status, 403);
}

#[tokio::test]
async fn without_names_nobody_reads_the_state() {
    let setup = Setup::start(|config| config.debug_client_names = vec![String::new()]).await;
    setup.state.debug.set_source(|| b"{}".to_vec());
    for client in [setup.ca.client_of("stowage-debug"), setup.ca.client_with_common_name(""), setup.ca.client()] {
        assert_eq!(setup.connect(Some(&client)).await.get("/debug/state").await.status, 403);
    }
}

#[tokio::test]
async fn the_state_is_made_once_per_second_for_all_clients() {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let setup = Setup::start(|_| {}).await;
    setup.state.debug.set_source(|| {
        assert!(MADE.fetch_add(1, Ordering::SeqCst) > 0, "a defect");
        std::thread::sleep(Duration::from_millis(100));
        b"{}".to_vec()
    });
    let operator = setup.ca.client_of("stowage-debug");
    let mut connection = setup.connect(Some(&operator)).await;
    assert_eq!(connection.get("/debug/state").await.status, 500);
    let mut other = setup.connect(Some(&operator)).await;
    let begin = std::time::Instant::now();
    for _ in 0..10 {
        let (one, two) = tokio::join!(connection.get("/debug/state"), other.get("/debug/state"));
        assert!(one.status == 200 && two.status == 200, "{} {}", one.status, two.status);
    }
    let seconds = usize::try_from(begin.elapsed().as_secs()).unwrap();
    assert!(MADE.load(Ordering::SeqCst) <= 2 + seconds, "{}", MADE.load(Ordering::SeqCst));
}

#[tokio::test]
async fn clients_that_do_not_read_hold_back_only_their_own_address() {
    let setup = Setup::start(|_| {}).await;
    // More than the buffers of two sockets take.
    setup.state.debug.set_source(|| vec![b' '; 32 << 20]);
    let operator = setup.ca.client_of("stowage-debug");
    let mut idle = Vec::new();
    for _ in 0..2 {
        let mut stream = handshake(setup.addrs().https, &setup.ca, Some(&operator), HTTP1).await.unwrap();
        stream.write_all(b"GET /debug/state HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        idle.push(stream);
    }
    let mut connection = setup.connect(Some(&operator)).await;
    let refused = connection.get("/debug/state").await;
    assert_eq!((refused.status.as_u16(), refused.headers["retry-after"].as_bytes()), (429, &b"1"[..]));
    assert_eq!(connection.get("/livez").await.status, 200);
    assert_eq!(setup.connect(Some(&setup.client)).await.post("/v1/filter", ask(&["a"])).await.status, 200);
    drop(idle);
    for _ in 0..100 {
        if connection.get("/debug/state").await.status == 200 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the answers of connections that ended still count");
}
