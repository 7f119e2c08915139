//! What a cloud says of instances that are there and yet not well.

use std::collections::BTreeSet;

/// What is wrong with an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// The instance itself does not answer.
    InstanceStatus,
    /// The machine below it fails.
    SystemStatus,
    /// An event is scheduled that it does not outlive.
    EventStatus,
}

impl Category {
    /// The `category` of metrics and the reason of disruptions, Karpenter's word.
    pub fn label(self) -> &'static str {
        match self {
            Self::InstanceStatus => "instance_status",
            Self::SystemStatus => "system_status",
            Self::EventStatus => "event_status",
        }
    }
}

/// What to do about an instance, the mildest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remedy {
    /// Cordon it and drain it.
    Drain,
    /// Let it go without waiting for its pods: they are as good as gone. The claim's termination timestamp is now.
    Force,
}

/// An instance that something is wrong with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unhealthy {
    /// As `i-0123456789abcdef0`.
    pub instance_id: String,
    /// What; never empty.
    pub categories: BTreeSet<Category>,
}

impl Unhealthy {
    /// What to do: a failed check outweighs a scheduled event.
    pub fn remedy(&self) -> Remedy {
        if self.categories.iter().any(|category| *category != Category::EventStatus) {
            Remedy::Force
        } else {
            Remedy::Drain
        }
    }

    /// The category that decides what to do, in a word.
    pub fn reason(&self) -> &'static str {
        self.categories.first().map_or("unknown", |category| category.label())
    }
}

/// What was unhealthy at the last look, so that each trouble is counted once until it is over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    seen: BTreeSet<(String, Category)>,
}

impl Known {
    /// Takes the answers of a look, and gives the troubles that are new since the last.
    pub fn look(&mut self, found: &[Unhealthy]) -> Vec<(String, Category)> {
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

    fn trouble(id: &str, categories: &[Category]) -> Unhealthy {
        Unhealthy { instance_id: id.into(), categories: categories.iter().copied().collect() }
    }

    #[test]
    fn c38_a_trouble_is_counted_once_until_it_is_over() {
        let (a, b) = (trouble("i-1", &[Category::InstanceStatus]), trouble("i-2", &[Category::EventStatus]));
        let mut known = Known::default();
        assert_eq!(known.look(&[a.clone(), b.clone()]).len(), 2);
        assert_eq!(known.look(&[a.clone(), b.clone()]), []);
        assert_eq!(known.look(std::slice::from_ref(&b)), []);
        assert_eq!(known.look(&[a, b]), [("i-1".to_owned(), Category::InstanceStatus)]);
    }

    #[test]
    fn c38_a_failed_check_outweighs_a_scheduled_event() {
        use Category::{EventStatus, InstanceStatus, SystemStatus};
        for (categories, remedy, reason) in [
            (&[EventStatus][..], Remedy::Drain, "event_status"),
            (&[SystemStatus], Remedy::Force, "system_status"),
            (&[EventStatus, SystemStatus], Remedy::Force, "system_status"),
            (&[EventStatus, SystemStatus, InstanceStatus], Remedy::Force, "instance_status"),
        ] {
            let one = trouble("i-1", categories);
            assert_eq!((one.remedy(), one.reason()), (remedy, reason), "{categories:?}");
        }
    }
}
