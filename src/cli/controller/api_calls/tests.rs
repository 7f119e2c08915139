use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use http_body_util::{BodyExt, StreamBody};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, WatchParams};
use kube::client::ClientBuilder;
use kube::{Api, Client};
use stowage_model::time::UnixMillis;
use tower::service_fn;

use super::*;

#[test]
fn a_call_is_named_by_its_verb_and_resource_without_names_of_objects() {
    for (method, path, query, verb, resource) in [
        (Method::GET, "/api/v1/pods", "", "list", "pods"),
        (Method::GET, "/api/v1/pods", "limit=500&watch=true&resourceVersion=1", "watch", "pods"),
        (Method::GET, "/api/v1/namespaces", "", "list", "namespaces"),
        (Method::GET, "/api/v1/namespaces/kube-system", "", "get", "namespaces"),
        (Method::GET, "/api/v1/namespaces/kube-system/pods", "", "list", "pods"),
        (Method::POST, "/api/v1/namespaces/n/pods/p/eviction", "", "create", "pods/eviction"),
        (Method::PATCH, "/apis/karpenter.sh/v1/nodeclaims/c/status", "", "patch", "nodeclaims/status"),
        (Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/n/leases/l", "", "update", "leases"),
        (Method::DELETE, "/api/v1/nodes/n", "", "delete", "nodes"),
        (Method::GET, "/version", "", "list", ""),
    ] {
        let call = Call::of(&method, path, query);
        assert_eq!((call.verb, &*call.resource), (verb, resource), "{method} {path}");
    }
}

/// A client whose server responds to every request with these parts of a body, and then waits, or ends the body regularly.
fn client(calls: &ApiCalls, parts: &'static [&'static str], ends: bool) -> Client {
    let serve = move |_: Request<Body>| async move {
        let parts = stream::iter(parts).map(|part| Ok::<_, BoxError>(Frame::data(Bytes::from_static(part.as_bytes()))));
        let rest = if ends { stream::empty().boxed() } else { stream::pending().boxed() };
        let body: Box<DynBody> = Box::new(StreamBody::new(parts.chain(rest)).map_err(BoxError::from));
        // Without a `Date`: the clock of the process is that of other tests, too.
        Ok::<_, BoxError>(Response::new(body))
    };
    ClientBuilder::new(service_fn(serve), "default").with_layer(calls).build()
}

/// The age of pods in seconds after a watch with these parts, if they were listed an hour ago.
async fn age_after(parts: &'static [&'static str], ends: bool) -> u64 {
    let calls = ApiCalls { metrics: Metrics::new(), signs: Arc::default() };
    let now = UnixMillis(clock::now().0);
    calls.signs.record_list("pods", now - Duration::from_hours(1));
    let pods: Api<Pod> = Api::all(client(&calls, parts, ends));
    let events = pods.watch(&WatchParams::default(), "1").await.unwrap();
    let _ = tokio::time::timeout(Duration::from_millis(50), events.for_each(|_| async {})).await;
    now.saturating_since(calls.signs.as_of(&["pods"], now)).as_secs()
}

#[tokio::test]
async fn bookmarks_and_the_regular_end_of_a_watch_are_signs_and_errors_are_not() {
    const BOOKMARK: &str = "{\"type\":\"BOOKMARK\",\"object\":{\"kind\":\"Pod\",\"apiVersion\":\"v1\",\"metadata\":{\"resourceVersion\":\"2\"}}}\n";
    const GONE: &str = "{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"code\":410,\"message\":\"too old\",\"reason\":\"Expired\"}}\n";
    assert_eq!(age_after(&[BOOKMARK], false).await, 0);
    assert_eq!(age_after(&[], true).await, 0);
    assert_eq!(age_after(&[], false).await, 3_600, "the head of the response is no sign");
    assert_eq!(age_after(&[GONE], true).await, 3_600);
}

#[tokio::test]
async fn requests_are_counted_by_verb_resource_and_code() {
    let calls = ApiCalls { metrics: Metrics::new(), signs: Arc::default() };
    let pods: Api<Pod> = Api::all(client(&calls, &["{\"items\":[],\"metadata\":{}}"], true));
    pods.list(&ListParams::default()).await.unwrap();
    assert_eq!(calls.metrics.api_requests.with_label_values(&["list", "pods", "200"]).get(), 1);
    assert_eq!(calls.metrics.api_seconds.with_label_values(&["list", "pods"]).get_sample_count(), 1);
    assert_eq!(calls.signs.ages(clock::now()).count(), 0, "a list is recorded when it is complete");
}

#[tokio::test]
async fn a_caller_that_does_something_else_keeps_nobody_waiting() {
    let (sent, answers) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
    let (received, allowed) = (Arc::clone(&sent), Arc::clone(&answers));
    let serve = move |_: Request<Body>| {
        let (received, allowed) = (Arc::clone(&received), Arc::clone(&allowed));
        async move {
            received.fetch_add(1, Ordering::Relaxed);
            allowed.acquire().await?.forget();
            let body = http_body_util::Full::new(Bytes::from_static(b"{\"items\":[],\"metadata\":{}}"));
            Ok::<_, BoxError>(Response::new(Box::new(body.map_err(BoxError::from)) as Box<DynBody>))
        }
    };
    let calls = ApiCalls { metrics: Metrics::new(), signs: Arc::default() };
    let pods: Api<Pod> = Api::all(ClientBuilder::new(service_fn(serve), "default").with_layer(&calls).build());
    let parameters = ListParams::default();
    let mut begun: Vec<_> = (0..IN_FLIGHT).map(|_| Box::pin(pods.list(&parameters))).collect();
    while sent.load(Ordering::Relaxed) < IN_FLIGHT {
        for request in &mut begun {
            assert!(futures::poll!(request).is_pending());
        }
        tokio::task::yield_now().await;
    }
    // Their responses arrive, and nobody polls them.
    answers.add_permits(IN_FLIGHT + 1);
    let another = tokio::time::timeout(Duration::from_secs(10), pods.list(&parameters)).await;
    another.expect("a request in time").unwrap();
    drop(begun);
}

#[test]
fn the_date_of_a_response_is_read() {
    let with = |date: &str| {
        let body: Box<DynBody> = Box::new(http_body_util::Empty::new().map_err(BoxError::from));
        server_time(&Response::builder().header(DATE, date).body(body).unwrap())
    };
    assert_eq!(with("Mon, 23 Nov 2026 00:15:21 GMT").unwrap().to_string(), "2026-11-23T00:15:21.5Z");
    assert_eq!(with("soon"), None);
}
