//! Writes events about objects. Equal events are one object with a count, as in client-go; a note that differs is another event, and
//! a refused event is written later.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use stowage_model::events::{EventSpec, EventType};
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

/// Equal events about one object are written at most once in this period.
const REPEAT: Duration = Duration::from_mins(2);
/// A refused event is not written again before this time has passed: some callers emit it in every pass.
const RETRY: Duration = Duration::from_secs(10);
/// Maximum number of events that are remembered. While so many were written in [`REPEAT`], no other event is.
const MEMORY: usize = 20_000;
/// Minimum time between two removals of old events from the memory.
const SWEEP: Duration = Duration::from_secs(5);
/// Longest note in bytes: the API server refuses more than 1,024.
const NOTE_BYTES: usize = 1_000;
/// Longest beginning of an event's name that is the name of its object.
const NAME_BYTES: usize = 200;

/// UID of the object, reason and note as it is written.
type Key = (String, &'static str, String);

/// A remembered event.
#[derive(Clone, Debug)]
struct Emitted {
    /// When it was last attempted.
    at: UnixMillis,
    /// Whether the last attempt was refused, or has not ended.
    refused: bool,
    /// The name of its object, once it exists.
    name: Option<String>,
    count: i32,
}

/// The recorder.
pub struct EventRecorder {
    client: Client,
    /// The component that the events name.
    component: String,
    memory: Mutex<Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    emitted: HashMap<Key, Emitted>,
    /// When old events were last removed.
    swept: UnixMillis,
}

impl Memory {
    /// Records an attempt, and returns what is known of an equal event.
    ///
    /// # Errors
    /// The event must not be written now: whether an equal one is.
    fn admit(&mut self, key: &Key, now: UnixMillis) -> Result<Option<Emitted>, bool> {
        let known = self.emitted.get(key).cloned();
        if let Some(known) = &known
            && !known.at.is_older_than(if known.refused { RETRY } else { REPEAT }, now)
        {
            return Err(!known.refused);
        }
        if self.emitted.len() >= MEMORY && self.swept.is_older_than(SWEEP, now) {
            self.swept = now;
            self.emitted.retain(|_, emitted| !emitted.at.is_older_than(REPEAT, now));
        }
        if known.is_none() && self.emitted.len() >= MEMORY {
            return Err(false);
        }
        let (name, count) = known.clone().map_or((None, 0), |known| (known.name, known.count));
        self.emitted.insert(key.clone(), Emitted { at: now, refused: true, name, count });
        Ok(known)
    }
}

impl EventRecorder {
    pub fn new(client: Client, component: String) -> Self {
        Self { client, component, memory: Mutex::default() }
    }

    /// Writes an event, unless an equal one was written in the last two minutes. Returns whether it is written. A failure is only
    /// logged; an equal event is refused without a request for ten seconds.
    pub async fn emit(&self, about: &ObjectReference, event: EventSpec<'_>, now: UnixMillis) -> bool {
        let reason = event.declared().reason();
        let note = beginning(event.note(), NOTE_BYTES).to_owned();
        let key = (about.uid.clone().unwrap_or_default(), reason, note);
        let known = match lock(&self.memory).admit(&key, now) {
            Ok(known) => known,
            Err(written) => return written,
        };
        match self.write(about, event, known).await {
            Ok((name, count)) => {
                let written = Emitted { at: now, refused: false, name: Some(name), count };
                lock(&self.memory).emitted.insert(key, written);
                true
            }
            Err(error) => {
                tracing::debug!(%error, reason, "failed to emit event");
                false
            }
        }
    }

    /// Counts the known event, or creates one. Returns its name and count.
    async fn write(
        &self,
        about: &ObjectReference,
        event: EventSpec<'_>,
        known: Option<Emitted>,
    ) -> Result<(String, i32), kube::Error> {
        let namespace = about.namespace.as_deref().unwrap_or("default");
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let now = Timestamp::now();
        if let Some(Emitted { name: Some(name), count, .. }) = known {
            let count = count.saturating_add(1);
            let patch = json!({"series": {"count": count, "lastObservedTime": MicroTime(now)}});
            match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
                // The API server deletes events after an hour.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                other => return other.map(|_| (name, count)),
            }
        }
        let new = event_object(about, event, &self.component, now);
        let name = new.metadata.name.clone().unwrap_or_default();
        api.create(&PostParams::default(), &new).await?;
        Ok((name, 1))
    }
}

fn event_object(about: &ObjectReference, event: EventSpec<'_>, component: &str, now: Timestamp) -> Event {
    let declared = event.declared();
    let object = beginning(about.name.as_deref().unwrap_or(component), NAME_BYTES).trim_end_matches(['-', '.']);
    let kind = match declared.event_type() {
        EventType::Warning => "Warning",
        EventType::Normal => "Normal",
    };
    Event {
        metadata: ObjectMeta {
            namespace: about.namespace.clone(),
            name: Some(format!("{object}.{:x}", now.as_nanosecond())),
            ..ObjectMeta::default()
        },
        action: Some(declared.reason().to_owned()),
        reason: Some(declared.reason().to_owned()),
        event_time: Some(MicroTime(now)),
        regarding: Some(about.clone()),
        note: Some(beginning(event.note(), NOTE_BYTES).to_owned()),
        reporting_controller: Some(component.to_owned()),
        reporting_instance: Some(component.to_owned()),
        type_: Some(kind.to_owned()),
        ..Event::default()
    }
}

/// The beginning of a text of at most this many bytes.
fn beginning(text: &str, bytes: usize) -> &str {
    let end = text.floor_char_boundary(bytes);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_events_is_bounded() {
        let (mut memory, now) = (Memory::default(), UnixMillis(1_000_000));
        let key = |number: usize| (number.to_string(), "Reason", String::new());
        assert!((0..MEMORY).all(|number| memory.admit(&key(number), now).is_ok()));
        assert_eq!(memory.admit(&key(0), now).err(), Some(false), "repeated before it is written");
        assert_eq!(memory.admit(&key(MEMORY), now).err(), Some(false), "one more");
        assert_eq!(memory.emitted.len(), MEMORY);
        assert!(memory.admit(&key(MEMORY), now + REPEAT).is_ok());
        assert_eq!(memory.emitted.len(), 1);
    }
}
