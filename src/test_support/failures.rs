//! Runs one write path without failures and with every failure (rejected requests, lost responses, a crash between two writes),
//! and verifies that a repetition by a fresh process ends in the state of the run without failures.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use stowage_model::labels;

use crate::controllers::context::Context;
use crate::decisions::placement::mode::PlacementMode;
use crate::test_support::kubernetes::object_store::{Key, Refusal};
use crate::test_support::kubernetes::{FakeApi, Fault, Recorded};
use crate::test_support::scripted_cloud::FakeCloud;

/// The API server and the cloud before the write path runs.
pub struct World {
    pub api: FakeApi,
    pub cloud: Arc<FakeCloud>,
    pub placement: PlacementMode,
    /// Whether a watch without delay applies every write to the state.
    pub watched: bool,
}

impl World {
    /// A world with these objects and a cloud without instances.
    pub fn new(api: FakeApi) -> Self {
        Self { api, cloud: Arc::default(), placement: PlacementMode::Nominate, watched: false }
    }

    /// A world with this scripted cloud.
    pub fn with_cloud(self, cloud: FakeCloud) -> Self {
        Self { cloud: Arc::new(cloud), ..self }
    }

    /// The context of a process that has just started.
    pub fn context(&self) -> Arc<Context> {
        let cloud = Arc::clone(&self.cloud) as Arc<_>;
        if self.watched {
            self.api.watching_context(cloud, self.placement)
        } else {
            self.api.context(cloud, self.placement)
        }
    }
}

/// The failures that are injected into every write, by name.
fn failures() -> Vec<(&'static str, Fault)> {
    let conflict = Refusal::conflict(&Key::new("objects", "", "o"));
    vec![
        ("written by another", Fault::WrittenByAnother),
        ("409", Fault::Refused(conflict)),
        ("404", Fault::DeletedByAnother),
        ("422", Fault::Refused(Refusal::invalid("the object is invalid"))),
        ("429, Retry-After 2 s, once", Fault::Refused(Refusal::too_many_requests(2))),
        ("504", Fault::Refused(Refusal::gateway_timeout())),
        ("no answer", Fault::NoAnswer),
        ("lost answer", Fault::LostAnswer),
        ("crash before", Fault::CrashBefore),
        ("crash after", Fault::CrashAfter),
    ]
}

/// The result of a write path: `ok`, or a short form of the error.
pub fn outcome<T, E: std::error::Error + 'static>(result: Result<T, E>) -> String {
    match result {
        Ok(_) => "ok".into(),
        Err(error) => brief(&error),
    }
}

/// The code of an API server error, or the message of any other error.
fn brief(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = Some(error);
    while let Some(error) = cause {
        match error.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(status)) => return format!("error {}", status.code),
            Some(kube::Error::Service(error)) => return format!("error {error}"),
            _ => cause = error.source(),
        }
    }
    format!("error {error}")
}

/// Runs `act` in worlds created by `setup`: without failures, again by a fresh process, and with each failure of each of its
/// writes, followed by a run of a fresh process without failures. Returns a transcript.
///
/// The transcript lists the writes and events of the run without failures and the objects it changed; then each write. Below a write are only those of
/// its failures that are not made up for: the outcome, how often the write was sent, and the outcome and the end state of the repetition. A failure is
/// made up for if the repetition succeeds and ends in the state of the run without failures, but for the object that another client deleted. The write of
/// another client must be kept, and its conflict may be the outcome; after `429` and the wait that it asks for, the outcome must be that of the run
/// without failures.
pub async fn transcript(setup: impl Fn() -> World, act: impl AsyncFn(Arc<Context>) -> String) -> String {
    transcript_without(&[], setup, act).await
}

/// [`transcript`] without the failures of these names.
pub async fn transcript_without(
    left_out: &[&str],
    setup: impl Fn() -> World,
    act: impl AsyncFn(Arc<Context>) -> String,
) -> String {
    let mut out = String::new();
    let world = setup();
    let before = normalized(&world.api);
    let done = run(&world, &act).await;
    let writes = world.api.writes();
    writeln!(out, "undisturbed: {done}").unwrap();
    for write in &writes {
        let body = world.api.with_numbered_names(&without_times(&write.body));
        writeln!(out, "  {} {body}", world.api.with_numbered_names(&write.line())).unwrap();
    }
    for event in world.api.events() {
        writeln!(out, "  event {}", world.api.with_numbered_names(&strip_times(&event))).unwrap();
    }
    for call in world.cloud.calls() {
        writeln!(out, "  cloud {call}").unwrap();
    }
    let wanted = normalized(&world.api);
    writeln!(out, "  changes {}", changed(&before, &wanted)).unwrap();
    world.api.reset();
    let again = run(&world, &act).await;
    writeln!(out, "again: {}, {}", again, effect(&world, &wanted)).unwrap();
    let mut seen: Vec<String> = Vec::new();
    for write in &writes {
        let line = write.line();
        // Equal requests are tested once: the fault applies to the first of them.
        if seen.contains(&line) {
            continue;
        }
        writeln!(out, "{line}").unwrap();
        seen.push(line.clone());
        let mut results: Vec<(String, String)> = Vec::new();
        for (name, fault) in failures().into_iter().filter(|(name, _)| !left_out.contains(name)) {
            let (is_made_up_for, result) = one_failure(&setup(), &act, &line, &fault, (&done, &wanted)).await;
            if is_made_up_for {
                continue;
            }
            match results.iter_mut().find(|(_, other)| *other == result) {
                Some((names, _)) => *names = format!("{names} | {name}"),
                None => results.push((name.to_owned(), result)),
            }
        }
        for (names, result) in results {
            writeln!(out, "  {names}: {result}").unwrap();
        }
    }
    out
}

async fn one_failure(
    world: &World,
    act: &impl AsyncFn(Arc<Context>) -> String,
    line: &str,
    fault: &Fault,
    undisturbed: (&str, &BTreeMap<String, Value>),
) -> (bool, String) {
    let (outcome, wanted) = undisturbed;
    let once = matches!(fault, Fault::WrittenByAnother | Fault::DeletedByAnother | Fault::LostAnswer)
        || matches!(fault, Fault::Refused(refusal) if refusal.retry_after.is_some());
    let of = |line: &str| {
        let line = line.to_owned();
        move |request: &Recorded| request.line() == line
    };
    world.api.inject(fault.clone(), if once { 1 } else { usize::MAX }, of(line));
    let mut done = run(world, act).await;
    if done == "stopped" && *fault == Fault::NoAnswer {
        done = "waits forever".into();
    }
    let sent = world.api.writes().into_iter().filter(|write| write.line() == line).count();
    let waited = world.api.waited().as_millis().div_ceil(1_000);
    let is_handled = match fault {
        Fault::WrittenByAnother => done == outcome || done.ends_with("error 409"),
        Fault::Refused(Refusal { retry_after: Some(after), .. }) => {
            done == outcome && sent > 1 && waited >= u128::from(*after)
        }
        _ => true,
    };
    let mut out = done;
    if sent > 1 {
        write!(out, ", sent {sent} times").unwrap();
    }
    world.api.reset();
    let again = run(world, act).await;
    let effect = effect(world, wanted);
    write!(out, "; again: {again}, {effect}").unwrap();
    let keeps = *fault != Fault::WrittenByAnother || keeps_the_others_write(&world.api);
    out.push_str(if keeps { "" } else { ", LOSES THE OTHER'S WRITE" });
    let target = line.split_once(' ').map_or("", |(_, target)| target);
    let is_as_wanted = match effect.split_once(", ") {
        Some((_, "as undisturbed")) => true,
        // The object that another client deleted is absent, and nothing else differs.
        Some((_, differs)) => {
            let absent = differs.strip_prefix("differs: -").filter(|path| !path.contains(", "));
            *fault == Fault::DeletedByAnother && absent.is_some_and(|path| target.starts_with(path))
        }
        None => false,
    };
    let succeeds = !again.starts_with("error") || outcome.starts_with("error");
    (is_handled && keeps && succeeds && is_as_wanted, out)
}

/// Runs an endless loop until its first wait: yields far more often than its requests need.
pub async fn first_turn(forever: impl Future<Output = ()>) {
    let turns = async {
        for _ in 0..2_000 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        () = forever => {}
        () = turns => {}
    }
}

/// Runs the write path in a fresh process until it ends or crashes.
async fn run(world: &World, act: &impl AsyncFn(Arc<Context>) -> String) -> String {
    tokio::select! {
        biased;
        done = act(world.context()) => done,
        () = world.api.stopped() => "stopped".into(),
    }
}

/// The writes since the last [`FakeApi::reset`], and whether the objects are in the wanted state.
fn effect(world: &World, wanted: &BTreeMap<String, Value>) -> String {
    let now = normalized(&world.api);
    let writes = match world.api.writes().len() {
        0 => "no write".to_owned(),
        1 => "1 write".to_owned(),
        count => format!("{count} writes"),
    };
    let differing = changed(wanted, &now);
    if differing == "nothing" { format!("{writes}, as undisturbed") } else { format!("{writes}, differs: {differing}") }
}

/// The objects that differ, and how.
fn changed(before: &BTreeMap<String, Value>, after: &BTreeMap<String, Value>) -> String {
    let mut out: Vec<String> = Vec::new();
    for (path, object) in after {
        match before.get(path) {
            None => out.push(format!("+{path}")),
            Some(old) if old != object => {
                let mut members = Vec::new();
                differences(old, object, "", 2, &mut members);
                out.push(format!("{path} ({})", members.join(" ")));
            }
            Some(_) => {}
        }
    }
    out.extend(before.keys().filter(|path| !after.contains_key(*path)).map(|path| format!("-{path}")));
    if out.is_empty() { "nothing".into() } else { out.join(", ") }
}

/// Paths of the members that differ, no deeper than `depth`.
fn differences(old: &Value, new: &Value, path: &str, depth: usize, out: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(a), Value::Object(b)) if depth > 0 => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                differences(
                    a.get(key).unwrap_or(&Value::Null),
                    b.get(key).unwrap_or(&Value::Null),
                    &path,
                    depth - 1,
                    out,
                );
            }
        }
        _ if old != new => out.push(path.to_owned()),
        _ => {}
    }
}

/// The objects without the members that differ between runs: resource versions, times, and the marks of another client's write.
fn normalized(api: &FakeApi) -> BTreeMap<String, Value> {
    let mut objects = api.with_numbered_names(&api.objects());
    for object in objects.values_mut() {
        *object = without_times(object);
        if let Some(conditions) = object.pointer_mut("/status/conditions").and_then(Value::as_array_mut) {
            conditions.retain(|condition| condition["type"] != "other.example/Wrote");
        }
        if let Some(meta) = object["metadata"].as_object_mut() {
            for member in ["resourceVersion", "generation"] {
                meta.remove(member);
            }
            if let Some(annotations) = meta.get_mut("annotations").and_then(Value::as_object_mut) {
                annotations.remove("other.example/wrote");
            }
            meta.retain(|_, value| !value.as_object().is_some_and(serde_json::Map::is_empty));
        }
        let Some(spec) = object["spec"].as_object_mut() else { continue };
        for list in ["taints", "tolerations"] {
            if let Some(entries) = spec.get_mut(list).and_then(Value::as_array_mut) {
                entries.retain(|entry| !entry["key"].as_str().unwrap_or_default().starts_with("other.example/"));
            }
        }
        // An absent list and an empty list are equivalent.
        spec.retain(|_, value| !value.is_null() && value.as_array().is_none_or(|entries| !entries.is_empty()));
    }
    objects
}

/// Whether every object that another client wrote still contains that write, or was deleted since.
fn keeps_the_others_write(api: &FakeApi) -> bool {
    let whole = |path: &str, object: &Value| {
        let has = |list: &str| {
            let entries = object["spec"][list].as_array();
            entries.is_some_and(|entries| {
                entries.iter().any(|entry| entry["key"].as_str().unwrap_or_default().starts_with("other.example/"))
            })
        };
        let wrote = &object["metadata"]["annotations"]["other.example/wrote"];
        let listed = match path.split('/').next() {
            _ if wrote.is_null() => !has("taints") && !has("tolerations"),
            Some("nodes") => has("taints"),
            Some("pods") => has("tolerations"),
            _ => true,
        };
        let conditions = object["status"]["conditions"].as_array();
        let judged = conditions.is_some_and(|list| list.iter().any(|one| one["type"] == "other.example/Wrote"));
        listed && (wrote != "a condition" || judged)
    };
    api.objects().iter().all(|(path, object)| whole(path, object))
}

/// A value without times and without launch group IDs, which derive from times.
fn without_times(value: &Value) -> Value {
    let member = |(key, value): (&String, &Value)| match value {
        Value::String(group) if key == labels::LAUNCH_GROUP => {
            let size = group.split_once('/').map_or("1", |(_, size)| size);
            (key.clone(), json!(format!("GROUP/{size}")))
        }
        value => (key.clone(), without_times(value)),
    };
    match value {
        Value::String(text) => json!(strip_times(text)),
        Value::Array(items) => items.iter().map(without_times).collect(),
        Value::Object(members) => members.iter().map(member).collect::<serde_json::Map<_, _>>().into(),
        other => other.clone(),
    }
}

/// A text with every time of this century replaced by `TIME`, and every number of 13 digits by `MILLIS`. Times of earlier years are constants of
/// the tests.
fn strip_times(text: &str) -> String {
    let mut out = String::new();
    let digits = text.split_inclusive(|c: char| !c.is_ascii_digit());
    let without_millis: String = digits
        .map(|part| {
            let number = part.trim_end_matches(|c: char| !c.is_ascii_digit());
            if number.len() == 13 { format!("MILLIS{}", &part[number.len()..]) } else { part.to_owned() }
        })
        .collect();
    let mut rest = &*without_millis;
    while let Some(at) = rest.find("20") {
        let end = rest[at..].find('Z').map(|length| at + length + 1);
        if let Some(end) = end.filter(|end| rest[at..*end].parse::<Timestamp>().is_ok()) {
            out.push_str(&rest[..at]);
            out.push_str("TIME");
            rest = &rest[end..];
        } else {
            out.push_str(&rest[..at + 2]);
            rest = &rest[at + 2..];
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt;
    use stowage_test_objects as objects;

    use super::*;

    /// Annotates the NodeClaim and then the Node, whichever is not annotated; `careless`: both or none, by the NodeClaim.
    async fn annotate(ctx: &Context, careless: bool) -> Result<(), kube::Error> {
        let annotated = |annotations: &BTreeMap<String, String>| annotations.contains_key("seen");
        let (claim, node) = {
            let state = ctx.cluster.read();
            let claim = state.claims.get("c").is_some_and(|claim| !annotated(claim.annotations()));
            let node = state.nodes.get("x").is_some_and(|node| !annotated(node.annotations()));
            (claim, if careless { claim } else { node })
        };
        let patch = json!({"metadata": {"annotations": {"seen": "true"}}});
        if claim {
            ctx.patch_claim("c", &patch).await?;
        }
        if node {
            ctx.patch_node("x", &patch).await?;
        }
        Ok(())
    }

    #[tokio::test]
    async fn only_failures_that_are_not_made_up_for_are_listed() {
        let world = || {
            let api = FakeApi::default();
            api.put(&objects::claim("c", &json!({})));
            api.put(&objects::node("x", &json!({})));
            World::new(api)
        };
        let writes = async |careless| {
            let text = transcript(world, async |ctx| outcome(annotate(&ctx, careless).await)).await;
            text.split_once("\nPATCH nodeclaims/c\n").unwrap().1.to_owned()
        };
        insta::assert_snapshot!(writes(false).await, @r#"
        PATCH nodes/x
        "#);
        insta::assert_snapshot!(writes(true).await, @r#"
          404: error 404; again: ok, no write, differs: nodes/x (metadata.annotations), -nodeclaims/c
          lost answer: error connection reset; again: ok, no write, differs: nodes/x (metadata.annotations)
          crash after: stopped; again: ok, no write, differs: nodes/x (metadata.annotations)
        PATCH nodes/x
          409: error 409; again: ok, no write, differs: nodes/x (metadata.annotations)
          422: error 422; again: ok, no write, differs: nodes/x (metadata.annotations)
          504: error 504, sent 7 times; again: ok, no write, differs: nodes/x (metadata.annotations)
          no answer: waits forever; again: ok, no write, differs: nodes/x (metadata.annotations)
          crash before: stopped; again: ok, no write, differs: nodes/x (metadata.annotations)
        "#);
    }
}
