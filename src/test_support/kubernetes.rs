//! A Kubernetes API server in memory: a `tower` service behind [`kube::Client`] that keeps objects, records requests and fails
//! on demand.
//!
//! Nothing sleeps: the client retries by the policy of the production client, and only adds up the time that it would wait.

pub mod object_store;
pub mod request;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};
use std::task::{self, Poll};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use http_body_util::BodyExt;
use hyper::header::{CONTENT_TYPE, RETRY_AFTER};
use hyper::{Method, Request, Response};
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ClientBuilder};
use kube::{Api, Client, Resource};
use prometheus::Registry;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stowage_cloud::Cloud;
use stowage_planner::PlanSettings;
use stowage_runtime::sync::lock;
use stowage_runtime::telemetry::controllers::ControllerMetrics;
use tokio::sync::Notify;
use tower::BoxError;
use tower::retry::{Policy, RetryLayer};

use crate::controllers::context::{Clients, Context, Settings};
use crate::controllers::retry_policy::retry_policy;
use crate::decisions::placement::mode::PlacementMode;
use crate::decisions::provisioning::batch_window::BatchLimits;
use crate::state::{Cluster, ClusterState};
use crate::test_support::kubernetes::object_store::{Key, Patch, Refusal, Store};
use crate::test_support::kubernetes::request::target;

pub use crate::test_support::kubernetes::request::{Fault, Recorded};

type Matcher = Box<dyn Fn(&Recorded) -> bool + Send>;

struct Injected {
    fault: Fault,
    matches: Matcher,
    /// Number of further requests that it applies to.
    left: usize,
}

#[derive(Default)]
struct Inner {
    store: Store,
    requests: Vec<Recorded>,
    faults: Vec<Injected>,
    /// The state that a watch without delay updates, if any.
    watched: Option<Arc<Cluster>>,
    waited: Duration,
    /// Users that may do what a SubjectAccessReview asks about.
    entitled: BTreeSet<String>,
}

/// The server. Clones share it.
#[derive(Clone, Default)]
pub struct FakeApi {
    inner: Arc<Mutex<Inner>>,
    stopped: Arc<Notify>,
}

/// The end of a client's connection.
#[derive(Clone)]
struct Server(FakeApi);

impl tower::Service<Request<Body>> for Server {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Body>, BoxError>>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let api = self.0.clone();
        async move { api.serve(request).await }.boxed()
    }
}

/// The production retry policy, without waiting.
#[derive(Clone)]
struct Impatient(RetryPolicy, Arc<Mutex<Inner>>);

impl<R> Policy<Request<Body>, Response<R>, BoxError> for Impatient {
    type Future = Ready<()>;

    fn retry(&mut self, request: &mut Request<Body>, result: &mut Result<Response<R>, BoxError>) -> Option<Ready<()>> {
        let sleep = self.0.retry(request, result)?;
        let wait = sleep.deadline().into_std().saturating_duration_since(Instant::now());
        lock(&self.1).waited += wait;
        Some(ready(()))
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        <RetryPolicy as Policy<Request<Body>, Response<R>, BoxError>>::clone_request(&mut self.0, request)
    }
}

impl FakeApi {
    /// Stores an object without recording a request. Returns it with its UID and resource version.
    pub fn put<K>(&self, object: &K) -> K
    where
        K: Resource<DynamicType = ()> + Serialize + DeserializeOwned,
    {
        let meta = object.meta();
        let key = Key::new(
            &K::plural(&()),
            meta.namespace.as_deref().unwrap_or_default(),
            meta.name.as_deref().unwrap_or_default(),
        );
        let mut value = serde_json::to_value(object).unwrap();
        value["apiVersion"] = json!(K::api_version(&()));
        value["kind"] = json!(K::kind(&()));
        serde_json::from_value(lock(&self.inner).store.put(key, value)).unwrap()
    }

    /// A stored object, by a path such as `nodes/n`.
    pub fn stored(&self, path: &str) -> Option<Value> {
        let inner = lock(&self.inner);
        inner.store.all().iter().find(|(key, _)| key.to_string() == path).map(|(_, object)| object.clone())
    }

    /// Every stored object but events, by its path.
    pub fn objects(&self) -> BTreeMap<String, Value> {
        let inner = lock(&self.inner);
        let objects = inner.store.all().iter().filter(|(key, _)| key.resource != "events");
        objects.map(|(key, object)| (key.to_string(), object.clone())).collect()
    }

    /// A text or an object with numbers instead of the random ends of the names that clients chose.
    pub fn with_numbered_names<T: Serialize + DeserializeOwned>(&self, of: &T) -> T {
        let text = serde_json::to_string(of).unwrap();
        serde_json::from_str(&lock(&self.inner).store.with_own_names(&text)).unwrap()
    }

    /// Events written so far, in the form `Warning Reason on Kind/name: note`.
    pub fn events(&self) -> Vec<String> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let requests = lock(&self.inner).requests.clone();
        let events =
            requests.iter().filter(|request| request.key.resource == "events" && request.method == Method::POST);
        events
            .map(|request| {
                let (event, about) = (&request.body, &request.body["regarding"]);
                let (type_, reason, note) = (text(&event["type"]), text(&event["reason"]), text(&event["note"]));
                format!("{type_} {reason} on {}/{}: {note}", text(&about["kind"]), text(&about["name"]))
            })
            .collect()
    }

    /// How often each stored event was observed.
    pub fn event_counts(&self) -> Vec<i64> {
        let inner = lock(&self.inner);
        let events = inner.store.all().iter().filter(|(key, _)| key.resource == "events");
        events.map(|(_, event)| event["series"]["count"].as_i64().unwrap_or(1)).collect()
    }

    /// Writes so far, without events.
    pub fn writes(&self) -> Vec<Recorded> {
        lock(&self.inner).requests.iter().filter(|request| request.is_write()).cloned().collect()
    }

    /// [`Recorded::line`] of every request so far, without events.
    pub fn lines(&self) -> Vec<String> {
        let inner = lock(&self.inner);
        inner.requests.iter().filter(|request| request.key.resource != "events").map(Recorded::line).collect()
    }

    /// The total backoff that the client would have waited before its retries.
    pub fn waited(&self) -> Duration {
        lock(&self.inner).waited
    }

    /// Injects a fault into the next `times` matching requests.
    pub fn inject(&self, fault: Fault, times: usize, matches: impl Fn(&Recorded) -> bool + Send + 'static) {
        lock(&self.inner).faults.push(Injected { fault, matches: Box::new(matches), left: times });
    }

    /// Injects a fault into every request with this [`Recorded::line`].
    pub fn inject_on(&self, line: &str, fault: Fault) {
        let line = line.to_owned();
        self.inject(fault, usize::MAX, move |request| request.line() == line);
    }

    /// Allows a user whatever a SubjectAccessReview asks about.
    pub fn entitle(&self, user: &str) {
        lock(&self.inner).entitled.insert(user.to_owned());
    }

    /// Removes the faults, and clears the record of requests and waits.
    pub fn reset(&self) {
        let mut inner = lock(&self.inner);
        (inner.faults, inner.requests, inner.waited) = Default::default();
    }

    /// Completes when a request stays without a response, or when the process would have crashed.
    pub async fn stopped(&self) {
        self.stopped.notified().await;
        // Other requests in flight are served.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    /// A client with the production retry policy.
    pub fn client(&self) -> Client {
        let policy = Impatient(retry_policy(), Arc::clone(&self.inner));
        ClientBuilder::new(Server(self.clone()), "default").with_layer(&RetryLayer::new(policy)).build()
    }

    /// A client without retries.
    pub fn client_without_retries(&self) -> Client {
        ClientBuilder::new(Server(self.clone()), "default").build()
    }

    /// The state of a process that has just listed the stored objects.
    pub fn cluster(&self) -> Arc<Cluster> {
        let mut state = ClusterState::default();
        for (key, object) in lock(&self.inner).store.all() {
            watch::apply(&mut state, key, object.clone());
        }
        Arc::new(Cluster::new(state))
    }

    /// The context of a process that has just started.
    pub fn context(&self, cloud: Arc<dyn Cloud>, placement: PlacementMode) -> Arc<Context> {
        self.context_of(self.cluster(), cloud, placement)
    }

    /// A context whose state a watch without delay updates.
    pub fn watching_context(&self, cloud: Arc<dyn Cloud>, placement: PlacementMode) -> Arc<Context> {
        let cluster = self.cluster();
        lock(&self.inner).watched = Some(Arc::clone(&cluster));
        self.context_of(cluster, cloud, placement)
    }

    fn context_of(&self, cluster: Arc<Cluster>, cloud: Arc<dyn Cloud>, placement: PlacementMode) -> Arc<Context> {
        let plan = PlanSettings::default();
        let settings = Settings {
            placement,
            batch: BatchLimits { idle: Duration::from_millis(100), max: Duration::from_secs(1) },
            max_purchases_per_minute: 100,
            max_disruptions_per_minute: 100,
            max_evictions_per_second: 50,
            node_repair: true,
            static_capacity: true,
            spot_to_spot: false,
            reporting_component: "stowage".into(),
            plan,
        };
        let metrics = ControllerMetrics::new(&Registry::new()).unwrap();
        let derived = Arc::default();
        let clients = Clients { writes: self.client(), plans: self.client(), evictions: self.client_without_retries() };
        Arc::new(Context::new(clients, cluster, derived, cloud, settings, metrics))
    }

    /// A typed interface to all objects of a cluster-scoped kind.
    pub fn all<K>(&self) -> Api<K>
    where
        K: Resource<Scope = kube::core::ClusterResourceScope, DynamicType = ()>,
    {
        Api::all(self.client())
    }

    async fn serve(&self, request: Request<Body>) -> Result<Response<Body>, BoxError> {
        let (parts, body) = request.into_parts();
        let bytes = body.collect().await?.to_bytes();
        let (key, subresource) = target(parts.uri.path());
        let query = parts.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        let request = Recorded {
            method: parts.method,
            key,
            subresource,
            query: query.map(|(key, value)| (key.to_owned(), value.to_owned())).collect(),
            content_type: parts.headers.get(CONTENT_TYPE).map_or("", |value| value.to_str().unwrap()).to_owned(),
            body: if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes)? },
        };
        if request.query.contains_key("watch") {
            return std::future::pending().await;
        }
        let (fault, answer) = {
            let mut inner = lock(&self.inner);
            inner.requests.push(request.clone());
            let fault = inner.fault(&request);
            (fault.clone(), inner.answer(&request, fault.as_ref()))
        };
        match fault {
            Some(Fault::NoAnswer | Fault::CrashBefore | Fault::CrashAfter) => {
                self.stopped.notify_one();
                std::future::pending().await
            }
            Some(Fault::LostAnswer) => {
                Err(std::io::Error::new(std::io::ErrorKind::ConnectionReset, "connection reset").into())
            }
            _ => Ok(respond(&request, answer)),
        }
    }
}

impl Inner {
    fn fault(&mut self, request: &Recorded) -> Option<Fault> {
        let found = self.faults.iter_mut().find(|injected| injected.left > 0 && (injected.matches)(request))?;
        found.left -= 1;
        Some(found.fault.clone())
    }

    fn answer(&mut self, request: &Recorded, fault: Option<&Fault>) -> Result<Value, Refusal> {
        match fault {
            Some(Fault::Refused(refusal)) => {
                // A conflict means that another client wrote: the watch reports its write.
                if refusal.code == 409 {
                    self.report(&request.key);
                }
                return Err(refusal.clone());
            }
            Some(Fault::NoAnswer | Fault::CrashBefore) => return Err(Refusal::gateway_timeout()),
            Some(Fault::WrittenByAnother) => {
                self.store.interfere(&request.key);
                self.report(&request.key);
            }
            Some(Fault::DeletedByAnother) => {
                self.store.remove(&request.key);
                self.report(&request.key);
            }
            Some(Fault::LostAnswer | Fault::CrashAfter) | None => {}
        }
        let answer = self.apply(request);
        if request.is_write() {
            self.report(&request.key);
        }
        answer
    }

    fn apply(&mut self, request: &Recorded) -> Result<Value, Refusal> {
        let (key, subresource, body) = (&request.key, request.subresource.as_str(), request.body.clone());
        match (&request.method, subresource) {
            (&Method::GET, _) if key.name.is_empty() => Ok(self.store.list(&key.resource, &key.namespace)),
            (&Method::GET, _) => self.store.get(key),
            (&Method::POST, "eviction") => self.store.evict(key, &body),
            (&Method::POST, _) if request.is_dry_run() => Ok(body),
            (&Method::POST, _) if key.resource == "subjectaccessreviews" => Ok(self.review(body)),
            (&Method::POST, _) => self.store.create(key.clone(), body),
            (&Method::PUT, _) => self.store.replace(key, subresource, body),
            (&Method::DELETE, _) => self.store.delete(key, &body),
            (&Method::PATCH, _) => {
                let patch = match request.content_type.as_str() {
                    "application/json-patch+json" => Patch::Json(body),
                    "application/merge-patch+json" | "application/apply-patch+yaml" => Patch::Merge(body),
                    "application/strategic-merge-patch+json" => Patch::Strategic(body),
                    other => panic!("the fake API server does not support patches of type {other}"),
                };
                self.store.patch(key, subresource, patch)
            }
            (method, _) => panic!("the fake API server does not support the method {method}"),
        }
    }

    fn review(&self, mut review: Value) -> Value {
        let allowed = review["spec"]["user"].as_str().is_some_and(|user| self.entitled.contains(user));
        review["status"] = json!({"allowed": allowed});
        review
    }

    /// The watch reports an object.
    fn report(&self, key: &Key) {
        let Some(cluster) = &self.watched else { return };
        cluster.update(|state| match self.store.get(key) {
            Ok(object) => watch::apply(state, key, object),
            Err(_) => watch::remove(state, key),
        });
    }
}

fn respond(request: &Recorded, answer: Result<Value, Refusal>) -> Response<Body> {
    let response = Response::builder().header(CONTENT_TYPE, "application/json");
    let (response, body) = match answer {
        Ok(object) => (response.status(if request.method == Method::POST { 201 } else { 200 }), object),
        Err(refusal) => {
            let mut response = response.status(refusal.code);
            if let Some(seconds) = refusal.retry_after {
                response = response.header(RETRY_AFTER, seconds);
            }
            (response, refusal.status())
        }
    };
    response.body(Body::from(serde_json::to_vec(&body).unwrap())).unwrap()
}

#[cfg(test)]
mod tests;
