//! Protections by the annotation `karpenter.sh/do-not-disrupt`, and when those with a duration end.

use std::collections::BTreeSet;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::duration;
use stowage_model::labels;
use stowage_model::time::UnixMillis;

/// How long a value of the annotation protects, if it is a duration.
fn lasts(value: &str) -> Option<Duration> {
    let millis = duration::parse(value).ok()?;
    u64::try_from(millis).ok().filter(|millis| *millis > 0).map(Duration::from_millis)
}

/// Whether a value is neither `true` nor `false` nor a duration. It protects without an end.
pub fn is_invalid(value: &str) -> bool {
    labels::forbids_disruption(value) && value != "true" && lasts(value).is_none()
}

/// When the protection by this value ends, of an object that is there since then: [`UnixMillis::MAX`] if it has no end, [`UnixMillis::MIN`] if it
/// does not protect.
pub fn protected_until(value: Option<&str>, since: Option<UnixMillis>) -> UnixMillis {
    let Some(value) = value.filter(|value| labels::forbids_disruption(value)) else { return UnixMillis::MIN };
    since.zip(lasts(value)).map_or(UnixMillis::MAX, |(since, lasts)| since + lasts)
}

/// When the protection of a Node or NodeClaim ends, counted from its creation.
pub fn protection_ends<K: ResourceExt>(object: &K) -> UnixMillis {
    let created = object.meta().creation_timestamp.as_ref().map(UnixMillis::from);
    protected_until(object.annotations().get(labels::DO_NOT_DISRUPT).map(String::as_str), created)
}

/// What is protected for a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protected {
    /// `namespace/name`.
    Pod(String),
    Node(String),
    Claim(String),
}

/// The protections with an end.
#[derive(Debug, Default)]
pub struct Protections {
    ends: BTreeSet<(UnixMillis, Protected)>,
    /// Those that end until then are over.
    over_at: UnixMillis,
}

impl Protections {
    /// Adds a protection, if it is one, and has an end.
    pub fn add(&mut self, until: UnixMillis, of: Protected) {
        if until > UnixMillis::MIN && until < UnixMillis::MAX {
            self.ends.insert((until, of));
        }
    }

    pub fn remove(&mut self, until: UnixMillis, of: Protected) {
        self.ends.remove(&(until, of));
    }

    /// Whether a protection that ends then is not over.
    pub fn lasts(&self, until: UnixMillis) -> bool {
        until > self.over_at
    }

    /// Whether a protection ends until now.
    pub fn has_ended(&self, now: UnixMillis) -> bool {
        self.ends.first().is_some_and(|(until, _)| *until <= now)
    }

    /// The next protection that ends until now, which is over from now on.
    pub fn end_next(&mut self, now: UnixMillis) -> Option<Protected> {
        self.over_at = now;
        self.has_ended(now).then(|| self.ends.pop_first())?.map(|(_, of)| of)
    }

    /// The keys of the pods that are protected for a time.
    pub fn pods(&self) -> impl Iterator<Item = &String> {
        self.ends.iter().filter_map(|(_, of)| if let Protected::Pod(key) = of { Some(key) } else { None })
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}
