//! Unhealthy instances: failed status checks and scheduled events (Karpenter AWS reference 9.4).

use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// The instance status check fails.
    InstanceStatus,
    /// The system status check fails: the host is impaired.
    SystemStatus,
    /// A scheduled event will stop, reboot or retire the instance.
    EventStatus,
}

impl Category {
    /// Value of the metric label `category`, and the reason of the disruption, as in Karpenter.
    pub fn label(self) -> &'static str {
        match self {
            Self::InstanceStatus => "instance_status",
            Self::SystemStatus => "system_status",
            Self::EventStatus => "event_status",
        }
    }
}

/// The response to an unhealthy instance, the mildest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remedy {
    /// Cordon and drain the node.
    Drain,
    /// Terminate without a drain, since the pods no longer run. The termination timestamp of the claim is the current time.
    Force,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unhealthy {
    /// Instance ID, such as `i-0123456789abcdef0`.
    pub instance_id: String,
    /// Never empty.
    pub categories: BTreeSet<Category>,
}

impl Unhealthy {
    /// A failed check takes precedence over a scheduled event.
    pub fn remedy(&self) -> Remedy {
        if self.categories.iter().any(|category| *category != Category::EventStatus) {
            Remedy::Force
        } else {
            Remedy::Drain
        }
    }
}

/// The unhealthy instances of the previous poll, so that each failure is counted once until it ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnhealthyTracker {
    seen: BTreeSet<(String, Category)>,
}

impl UnhealthyTracker {
    /// Records the result of a poll. Returns the failures that are new since the previous poll.
    pub fn newly_unhealthy(&mut self, found: &[Unhealthy]) -> Vec<(String, Category)> {
        let now: BTreeSet<(String, Category)> = found
            .iter()
            .flat_map(|one| one.categories.iter().map(|category| (one.instance_id.clone(), *category)))
            .collect();
        let new = now.difference(&self.seen).cloned().collect();
        self.seen = now;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unhealthy(id: &str, categories: &[Category]) -> Unhealthy {
        Unhealthy { instance_id: id.into(), categories: categories.iter().copied().collect() }
    }

    #[test]
    fn c38_a_failure_is_counted_once_until_it_ends() {
        let (a, b) = (unhealthy("i-1", &[Category::InstanceStatus]), unhealthy("i-2", &[Category::EventStatus]));
        let mut tracker = UnhealthyTracker::default();
        assert_eq!(tracker.newly_unhealthy(&[a.clone(), b.clone()]).len(), 2);
        assert_eq!(tracker.newly_unhealthy(&[a.clone(), b.clone()]), []);
        assert_eq!(tracker.newly_unhealthy(std::slice::from_ref(&b)), []);
        assert_eq!(tracker.newly_unhealthy(&[a, b]), [("i-1".to_owned(), Category::InstanceStatus)]);
    }

    #[test]
    fn c38_a_failed_check_takes_precedence_over_a_scheduled_event() {
        use Category::{EventStatus, InstanceStatus, SystemStatus};
        for (categories, remedy) in [
            (&[EventStatus][..], Remedy::Drain),
            (&[SystemStatus], Remedy::Force),
            (&[EventStatus, SystemStatus], Remedy::Force),
            (&[EventStatus, SystemStatus, InstanceStatus], Remedy::Force),
        ] {
            let one = unhealthy("i-1", categories);
            assert_eq!(one.remedy(), remedy, "{categories:?}");
        }
    }
}
