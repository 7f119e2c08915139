//! Pods that are left out of plans for a while, because they made one fail.
//!
//! What is remembered is the pod class: a controller that replaces a failing pod gets no new attempt for it, and a pod whose spec changes is
//! planned at once.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

/// First and longest time that a class is left out; it doubles with each failure.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(30), Duration::from_mins(5));
/// A namespace with more failing classes is left out as a whole: each of them may differ from the last.
const MAX_CLASSES: usize = 16;
/// Maximum number of namespaces with an entry; the pods of further ones are left out of one plan only.
const MAX_NAMESPACES: usize = 1_000;

/// Why a class is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// The planner panics.
    PlannerPanic,
    /// The API server rejects the NodeClaim.
    NodeClaimRejected,
    /// Nodes that were purchased for the pod did not take it: [`PurchaseBackoff`](super::purchase_backoff::PurchaseBackoff).
    PurchasedInVain,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 3] = [Self::PlannerPanic, Self::NodeClaimRejected, Self::PurchasedInVain];

    /// The label of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PlannerPanic => "planner_panic",
            Self::NodeClaimRejected => "nodeclaim_rejected",
            Self::PurchasedInVain => "purchased_in_vain",
        }
    }
}

#[derive(Debug)]
struct Entry {
    cause: Cause,
    until: UnixMillis,
    /// The time for which it is left out after the next failure.
    next: Duration,
}

/// The classes that are left out, or were, by namespace.
#[derive(Debug, Default)]
pub struct Quarantine {
    namespaces: BTreeMap<Arc<str>, HashMap<Arc<PodClass>, Entry>>,
}

impl Quarantine {
    /// Why pods of this class are left out of plans at `now`.
    pub fn cause(&self, class: &PodClass, now: UnixMillis) -> Option<Cause> {
        let classes = self.namespaces.get(&class.namespace)?;
        if let Some(entry) = classes.get(class) {
            return (now < entry.until).then_some(entry.cause);
        }
        let whole = classes.len() > MAX_CLASSES;
        let entry = classes.values().filter(|_| whole).max_by_key(|entry| (entry.until, entry.cause))?;
        (now < entry.until).then_some(entry.cause)
    }

    /// Whether a plan with pods of this class failed before.
    pub fn has_failed(&self, class: &PodClass) -> bool {
        self.namespaces.get(&class.namespace).is_some_and(|classes| classes.contains_key(class))
    }

    /// Leaves the class out from `now` on. Returns for how long; `None` when nothing more can be remembered.
    pub fn add(&mut self, class: &Arc<PodClass>, cause: Cause, now: UnixMillis) -> Option<Duration> {
        let full = self.namespaces.len() >= MAX_NAMESPACES && !self.namespaces.contains_key(&class.namespace);
        if full {
            return None;
        }
        let classes = self.namespaces.entry(Arc::clone(&class.namespace)).or_default();
        // A namespace that fails with ever new classes backs off as if they were one.
        let earlier = classes.values().filter(|entry| classes.len() > MAX_CLASSES && entry.until <= now);
        let first = earlier.map(|entry| entry.next).max().unwrap_or(BACKOFF.0);
        if classes.len() > MAX_CLASSES && !classes.contains_key(class) {
            let oldest = classes.iter().min_by_key(|(_, entry)| entry.until).map(|(class, _)| Arc::clone(class))?;
            classes.remove(&oldest);
        }
        let entry = classes.entry(Arc::clone(class)).or_insert(Entry { cause, until: now, next: first });
        let wait = entry.next;
        *entry = Entry { cause, until: now + wait, next: (wait * 2).min(BACKOFF.1) };
        Some(wait)
    }

    /// Forgets a class, because a plan with its pods was written.
    pub fn release(&mut self, class: &PodClass) {
        if let Some(classes) = self.namespaces.get_mut(&class.namespace) {
            classes.remove(class);
            if classes.is_empty() {
                self.namespaces.remove(&class.namespace);
            }
        }
    }

    /// Forgets the classes that are no longer left out and have no pod in `demand`.
    pub fn forget(&mut self, demand: &HashSet<&PodClass>, now: UnixMillis) {
        for classes in self.namespaces.values_mut() {
            classes.retain(|class, entry| now < entry.until || demand.contains(&**class));
        }
        self.namespaces.retain(|_, classes| !classes.is_empty());
    }

    /// The classes that are left out at `now`: namespace, cause and end.
    pub fn left_out(&self, now: UnixMillis) -> impl Iterator<Item = (&Arc<str>, Cause, UnixMillis)> {
        let entries =
            self.namespaces.iter().flat_map(|(name, classes)| classes.values().map(move |entry| (name, entry)));
        entries.filter(move |(_, entry)| now < entry.until).map(|(name, entry)| (name, entry.cause, entry.until))
    }

    /// Whether nothing is left out or remembered.
    pub fn is_empty(&self) -> bool {
        self.namespaces.is_empty()
    }
}

#[cfg(test)]
mod tests;
