//! Objects of the fake API server, with the API server's rules for writes: resource versions, preconditions, status
//! subresources, finalizers, graceful deletion and generated names.

use std::collections::BTreeMap;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

/// The key of an object: plural resource, namespace (empty for cluster-scoped kinds), name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub resource: String,
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub fn new(resource: &str, namespace: &str, name: &str) -> Self {
        Self { resource: resource.into(), namespace: namespace.into(), name: name.into() }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.namespace.as_str() {
            "" => write!(f, "{}/{}", self.resource, self.name),
            namespace => write!(f, "{}/{namespace}/{}", self.resource, self.name),
        }
    }
}

/// An error response of the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
    /// Seconds in the Retry-After header.
    pub retry_after: Option<u64>,
    /// Reason of the cause in `details.causes`, as in the response to an eviction that a budget refuses.
    pub cause: Option<&'static str>,
}

impl Refusal {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), retry_after: None, cause: None }
    }

    pub fn not_found(key: &Key) -> Self {
        Self::new(404, "NotFound", format!("{key} not found"))
    }

    pub fn already_exists(key: &Key) -> Self {
        Self::new(409, "AlreadyExists", format!("{key} already exists"))
    }

    pub fn conflict(key: &Key) -> Self {
        Self::new(409, "Conflict", format!("{key}: the object has been modified"))
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(422, "Invalid", message)
    }

    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(403, "Forbidden", message)
    }

    /// The server sheds load.
    pub fn too_many_requests(retry_after: u64) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(429, "TooManyRequests", "too many requests") }
    }

    /// A PodDisruptionBudget forbids an eviction.
    pub fn disruption_budget() -> Self {
        let message = "cannot evict pod as it would violate the pod's disruption budget";
        Self { cause: Some("DisruptionBudget"), ..Self::new(429, "TooManyRequests", message) }
    }

    /// The server's time limit expired.
    pub fn gateway_timeout() -> Self {
        Self::new(504, "Timeout", "request did not complete within the allotted timeout")
    }

    /// The body, a `Status`.
    pub fn status(&self) -> Value {
        let causes: Vec<Value> =
            self.cause.iter().map(|cause| json!({"reason": cause, "message": self.message})).collect();
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": self.code,
            "reason": self.reason, "message": self.message, "details": {"causes": causes}})
    }
}

/// A patch and how it is applied.
pub enum Patch {
    /// RFC 7386; server-side apply is treated alike.
    Merge(Value),
    /// RFC 6902.
    Json(Value),
    /// As a merge patch, but finalizers and owner references are added to those of the object.
    Strategic(Value),
}

/// The elements of `old` and, after them, those of `new` that it lacks.
fn union(old: &Value, new: &Value) -> Value {
    let mut all = old.as_array().cloned().unwrap_or_default();
    let key = |element: &Value| element.get("uid").unwrap_or(element).clone();
    for element in new.as_array().into_iter().flatten() {
        if !all.iter().any(|other| key(other) == key(element)) {
            all.push(element.clone());
        }
    }
    Value::Array(all)
}

/// The objects.
#[derive(Debug, Default)]
pub struct Store {
    objects: BTreeMap<Key, Value>,
    version: u64,
    named: u64,
    /// Names that clients chose for objects with `generateName`, and those that the store would have chosen.
    chosen: Vec<(String, String)>,
}

fn success() -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})
}

fn finalizers(object: &Value) -> usize {
    object["metadata"]["finalizers"].as_array().map_or(0, Vec::len)
}

fn is_deleting(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

fn seconds_from_now(seconds: i64) -> String {
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap();
    (now + SignedDuration::from_secs(seconds)).to_string()
}

impl Store {
    /// Every object, in the order of its key.
    pub fn all(&self) -> &BTreeMap<Key, Value> {
        &self.objects
    }

    pub fn get(&self, key: &Key) -> Result<Value, Refusal> {
        self.objects.get(key).cloned().ok_or_else(|| Refusal::not_found(key))
    }

    pub fn list(&self, resource: &str, namespace: &str) -> Value {
        let of = |key: &&Key| key.resource == resource && (namespace.is_empty() || key.namespace == namespace);
        let items: Vec<&Value> = self.objects.iter().filter(|(key, _)| of(key)).map(|(_, object)| object).collect();
        json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": self.version.to_string()}, "items": items})
    }

    /// Stores an object unchanged except for a UID and a resource version.
    pub fn put(&mut self, key: Key, mut object: Value) -> Value {
        self.version += 1;
        let meta = &mut object["metadata"];
        meta["resourceVersion"] = json!(self.version.to_string());
        if meta["uid"].is_null() {
            meta["uid"] = json!(format!("uid-{}", key.name));
        }
        self.objects.insert(key, object.clone());
        object
    }

    /// A text with the names that the store would have chosen for objects with `generateName`.
    pub fn with_own_names(&self, text: &str) -> String {
        self.chosen.iter().fold(text.to_owned(), |text, (chosen, own)| text.replace(chosen, own))
    }

    pub fn remove(&mut self, key: &Key) -> Option<Value> {
        self.objects.remove(key)
    }

    pub fn create(&mut self, mut key: Key, mut object: Value) -> Result<Value, Refusal> {
        if let (None, Some(prefix)) = (object["metadata"]["name"].as_str(), object["metadata"]["generateName"].as_str())
        {
            self.named += 1;
            key.name = format!("{prefix}{}", self.named);
        } else {
            key.name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        }
        if self.objects.contains_key(&key) {
            return Err(Refusal::already_exists(&key));
        }
        if let (Some(name), Some(prefix)) =
            (object["metadata"]["name"].as_str(), object["metadata"]["generateName"].as_str())
        {
            self.named += 1;
            self.chosen.push((name.to_owned(), format!("{prefix}{}", self.named)));
        }
        let meta = &mut object["metadata"];
        meta["name"] = json!(key.name);
        if !key.namespace.is_empty() {
            meta["namespace"] = json!(key.namespace);
        }
        meta["uid"] = json!(format!("uid-{}", key.name));
        meta["creationTimestamp"] = json!(seconds_from_now(0));
        meta["generation"] = json!(1);
        if let Some(members) = object.as_object_mut() {
            members.remove("status");
        }
        Ok(self.put(key, object))
    }

    pub fn replace(&mut self, key: &Key, subresource: &str, object: Value) -> Result<Value, Refusal> {
        let old = self.get(key)?;
        self.store(key, subresource, &old, object)
    }

    pub fn patch(&mut self, key: &Key, subresource: &str, patch: Patch) -> Result<Value, Refusal> {
        let old = self.get(key)?;
        let mut new = old.clone();
        match patch {
            Patch::Merge(patch) => json_patch::merge(&mut new, &patch),
            Patch::Strategic(mut patch) => {
                for list in ["finalizers", "ownerReferences"] {
                    if let Some(added) = patch["metadata"].get_mut(list) {
                        *added = union(&old["metadata"][list], added);
                    }
                }
                json_patch::merge(&mut new, &patch);
            }
            Patch::Json(operations) => {
                let operations: json_patch::Patch =
                    serde_json::from_value(operations).map_err(|error| Refusal::invalid(error.to_string()))?;
                json_patch::patch(&mut new, &operations).map_err(|error| Refusal::invalid(error.to_string()))?;
            }
        }
        self.store(key, subresource, &old, new)
    }

    /// Replaces `old` with `new` by the rules of an update.
    fn store(&mut self, key: &Key, subresource: &str, old: &Value, mut new: Value) -> Result<Value, Refusal> {
        let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
        if !version(&new).is_null() && version(&new) != version(old) {
            return Err(Refusal::conflict(key));
        }
        if new["metadata"]["uid"] != old["metadata"]["uid"] {
            return Err(Refusal::invalid("metadata.uid: field is immutable"));
        }
        if subresource == "status" {
            let status = new["status"].take();
            new = old.clone();
            if !status.is_null() {
                new["status"] = status;
            }
        } else if old["status"].is_null() {
            new.as_object_mut().map(|members| members.remove("status"));
        } else {
            new["status"] = old["status"].clone();
        }
        new["metadata"]["resourceVersion"] = version(old);
        if is_deleting(old) && finalizers(&new) > finalizers(old) {
            return Err(Refusal::invalid(
                "metadata.finalizers: no new finalizers can be added if the object is being deleted",
            ));
        }
        let tolerations = |object: &Value| object["spec"]["tolerations"].as_array().cloned().unwrap_or_default();
        if key.resource == "pods" && !tolerations(old).iter().all(|one| tolerations(&new).contains(one)) {
            return Err(Refusal::invalid("spec.tolerations: existing toleration can not be modified"));
        }
        if new == *old {
            return Ok(new);
        }
        if new["spec"] != old["spec"] && old["metadata"]["generation"].is_i64() {
            new["metadata"]["generation"] = json!(old["metadata"]["generation"].as_i64().unwrap_or(0) + 1);
        }
        let stored = self.put(key.clone(), new);
        if is_deleting(&stored) && finalizers(&stored) == 0 && key.resource != "pods" {
            self.objects.remove(key);
        }
        Ok(stored)
    }

    /// Deletes by `DeleteOptions`: at once, or when the finalizers or the grace period of a pod end.
    pub fn delete(&mut self, key: &Key, options: &Value) -> Result<Value, Refusal> {
        let mut object = self.get(key)?;
        for member in ["uid", "resourceVersion"] {
            let wanted = &options["preconditions"][member];
            if !wanted.is_null() && *wanted != object["metadata"][member] {
                return Err(Refusal::conflict(key));
            }
        }
        let grace = match key.resource.as_str() {
            "pods" if object["spec"]["nodeName"].is_string() => options["gracePeriodSeconds"]
                .as_i64()
                .or_else(|| object["spec"]["terminationGracePeriodSeconds"].as_i64())
                .unwrap_or(30),
            _ => 0,
        };
        if grace == 0 && finalizers(&object) == 0 {
            self.objects.remove(key);
            return Ok(success());
        }
        let at = seconds_from_now(grace);
        // A second deletion may shorten the grace period, never extend it.
        let sooner = |known: &str| known.parse::<Timestamp>().unwrap() > at.parse().unwrap();
        if object["metadata"]["deletionTimestamp"].as_str().is_none_or(sooner) {
            object["metadata"]["deletionTimestamp"] = json!(at);
            object["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
            object = self.put(key.clone(), object);
        }
        Ok(object)
    }

    /// Evicts a pod by an `Eviction`.
    pub fn evict(&mut self, key: &Key, eviction: &Value) -> Result<Value, Refusal> {
        self.delete(key, &eviction["deleteOptions"])?;
        Ok(success())
    }

    /// Writes an object as another client: an annotation, a condition, on a Node also a taint, and on a pod a toleration. Code under
    /// test must preserve these members.
    pub fn interfere(&mut self, key: &Key) {
        let Some(mut object) = self.objects.get(key).cloned() else { return };
        let list = |object: &mut Value, name: &str, entry: Value| {
            let mut entries = object["spec"][name].as_array().cloned().unwrap_or_default();
            entries.push(entry);
            object["spec"][name] = json!(entries);
        };
        let mut wrote = "an annotation";
        let conditions = object.pointer_mut("/status/conditions").and_then(Value::as_array_mut);
        if let Some(conditions) = conditions.filter(|_| key.resource != "nodes") {
            conditions.push(json!({"type": "other.example/Wrote", "status": "True", "reason": "Wrote", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}));
            wrote = "a condition";
        }
        object["metadata"]["annotations"]["other.example/wrote"] = json!(wrote);
        match key.resource.as_str() {
            "nodes" => list(&mut object, "taints", json!({"key": "other.example/taint", "effect": "NoExecute"})),
            "pods" => {
                list(&mut object, "tolerations", json!({"key": "other.example/toleration", "operator": "Exists"}));
            }
            _ => {}
        }
        self.put(key.clone(), object);
    }
}

#[cfg(test)]
mod tests;
