//! What EC2 was seen to have no capacity of: for three minutes it is not tried again.
//!
//! A mark is on one offering (type, zone and capacity type, in a placement group of its own where the launch was in one), on a
//! whole capacity type, or on a subnet. Marking again starts the three minutes anew. Time is an argument.

use std::collections::{BTreeSet, HashMap};

use crate::api::node_class::SubnetStatus;
use crate::cloud::Override;
use crate::model::offering::CapacityType;

/// How long a mark lasts, milliseconds.
pub const TTL_MS: i64 = 180_000;

/// A mark's subject.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Subject {
    /// An offering; in a placement group or a partition of it where the second, a [`scope`], says so.
    Offering(Override, Option<String>),
    /// Every offering of a capacity type.
    CapacityType(CapacityType),
    /// A subnet without free addresses.
    Subnet(String),
}

/// Where in a placement group a launch was: the group, or one of its partitions.
pub fn scope(group: &str, partition: Option<&str>) -> String {
    match partition {
        Some(partition) => format!("{group}/{partition}"),
        None => group.to_owned(),
    }
}

/// The marks and when they end, milliseconds since the epoch.
#[derive(Clone, Debug, Default)]
pub struct Unavailable {
    until: HashMap<Subject, i64>,
    /// Counts new marks and ended ones: an answer drawn from the marks holds until it moves.
    changes: u64,
}

impl Unavailable {
    /// Marks a subject. Returns true when it was not marked before.
    pub fn mark(&mut self, subject: Subject, now_ms: i64) -> bool {
        let before = self.until.insert(subject, now_ms + TTL_MS);
        let new = before.is_none_or(|until| until <= now_ms);
        self.changes += u64::from(new);
        new
    }

    fn holds(&self, subject: &Subject, now_ms: i64) -> bool {
        self.until.get(subject).is_some_and(|until| *until > now_ms)
    }

    /// Whether an offering is not to be tried at `now_ms`, in a placement group where `group` names one. Subnets are not looked at:
    /// see [`Unavailable::exhausted_zones`].
    pub fn covers(&self, offering: &Override, group: Option<&str>, now_ms: i64) -> bool {
        if self.until.is_empty() {
            return false;
        }
        self.holds(&Subject::CapacityType(offering.capacity_type), now_ms)
            || self.holds(&Subject::Offering(offering.clone(), None), now_ms)
            || group.is_some_and(|group| self.holds(&Subject::Offering(offering.clone(), Some(group.into())), now_ms))
    }

    /// As [`Unavailable::covers`], in a partition of the group where one is named: what was tried there alone counts too.
    pub fn covers_in(&self, offering: &Override, group: Option<&str>, partition: Option<&str>, now_ms: i64) -> bool {
        let alone = || {
            let scope = scope(group?, Some(partition?));
            Some(self.holds(&Subject::Offering(offering.clone(), Some(scope)), now_ms))
        };
        self.covers(offering, group, now_ms) || (!self.until.is_empty() && alone().unwrap_or(false))
    }

    /// Forgets what has ended. Returns a number that is another one whenever the marks are.
    pub fn prune(&mut self, now_ms: i64) -> u64 {
        let before = self.until.len();
        self.until.retain(|_, until| *until > now_ms);
        if self.until.len() != before {
            self.changes += 1;
        }
        self.changes
    }

    /// Zones all of whose subnets, as a class has them, are marked: they have no addresses left.
    pub fn exhausted_zones(&self, subnets: &[SubnetStatus], now_ms: i64) -> BTreeSet<String> {
        let marked = |subnet: &SubnetStatus| self.holds(&Subject::Subnet(subnet.id.clone()), now_ms);
        let mut zones: BTreeSet<String> = subnets.iter().map(|subnet| subnet.zone.clone()).collect();
        for subnet in subnets.iter().filter(|subnet| !marked(subnet)) {
            zones.remove(&subnet.zone);
        }
        zones
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offering(instance_type: &str, zone: &str, capacity_type: CapacityType) -> Override {
        Override { instance_type: instance_type.into(), zone: zone.into(), capacity_type }
    }

    fn subnet(id: &str, zone: &str) -> SubnetStatus {
        SubnetStatus { id: id.into(), zone: zone.into(), zone_id: None }
    }

    #[test]
    fn c11_one_offering_is_marked_for_three_minutes_and_no_other() {
        let mut marks = Unavailable::default();
        let out = offering("m5.xlarge", "a", CapacityType::Spot);
        assert!(marks.mark(Subject::Offering(out.clone(), None), 1_000));
        assert!(!marks.mark(Subject::Offering(out.clone(), None), 2_000), "marked again: only its end moves");
        assert!(marks.covers(&out, None, 2_000 + TTL_MS - 1));
        assert!(!marks.covers(&out, None, 2_000 + TTL_MS), "available again");
        for other in [
            offering("m5.xlarge", "b", CapacityType::Spot),
            offering("m5.xlarge", "a", CapacityType::OnDemand),
            offering("m5.large", "a", CapacityType::Spot),
        ] {
            assert!(!marks.covers(&other, None, 2_000), "{other:?}");
        }
        let before = marks.prune(2_000 + TTL_MS - 1);
        assert_eq!(marks.prune(2_000 + TTL_MS), before + 1, "an end is a change");
        assert_eq!(marks.prune(2_000 + TTL_MS), before + 1);
    }

    #[test]
    fn c13_a_capacity_type_is_marked_as_a_whole() {
        let mut marks = Unavailable::default();
        marks.mark(Subject::CapacityType(CapacityType::Spot), 0);
        assert!(marks.covers(&offering("m5.large", "a", CapacityType::Spot), None, TTL_MS - 1));
        assert!(!marks.covers(&offering("m5.large", "a", CapacityType::OnDemand), None, 1));
        assert!(!marks.covers(&offering("m5.large", "a", CapacityType::Spot), None, TTL_MS));
    }

    #[test]
    fn c15_a_zone_is_out_of_addresses_when_all_its_subnets_are() {
        let mut marks = Unavailable::default();
        marks.mark(Subject::Subnet("subnet-1".into()), 0);
        let zones = |subnets: &[SubnetStatus], now| marks.exhausted_zones(subnets, now);
        let one = [subnet("subnet-1", "a"), subnet("subnet-3", "b")];
        assert_eq!(zones(&one, 1), BTreeSet::from(["a".to_owned()]));
        assert!(zones(&[subnet("subnet-1", "a"), subnet("subnet-2", "a")], 1).is_empty());
        assert!(zones(&[subnet("subnet-2", "a"), subnet("subnet-1", "a")], 1).is_empty());
        assert!(zones(&one, TTL_MS).is_empty());
    }

    #[test]
    fn a_mark_made_in_a_placement_group_counts_there_only() {
        let mut marks = Unavailable::default();
        let any = offering("m5.large", "a", CapacityType::OnDemand);
        marks.mark(Subject::Offering(any.clone(), Some("pg-1".into())), 0);
        assert!(marks.covers(&any, Some("pg-1"), 1));
        assert!(!marks.covers(&any, Some("pg-2"), 1));
        assert!(!marks.covers(&any, None, 1));
        assert!(marks.covers_in(&any, Some("pg-1"), Some("2"), 1), "in every partition");
    }

    #[test]
    fn a_mark_made_in_a_partition_counts_in_that_partition_only() {
        let mut marks = Unavailable::default();
        let any = offering("m5.large", "a", CapacityType::OnDemand);
        marks.mark(Subject::Offering(any.clone(), Some(scope("pg-1", Some("2")))), 0);
        let covers = |group, partition| marks.covers_in(&any, group, partition, 1);
        assert!(covers(Some("pg-1"), Some("2")));
        assert!(!covers(Some("pg-1"), Some("1")) && !covers(Some("pg-1"), None) && !covers(Some("pg-2"), Some("2")));
    }
}
