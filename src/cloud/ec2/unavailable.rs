//! What EC2 was seen to have no capacity of: for three minutes it is not tried again.
//!
//! A mark is on one offering (type, zone and capacity type, in a placement group of its own where the launch was in one), on a
//! whole capacity type, or on a subnet. Marking again starts the three minutes anew. Time is an argument.

use std::collections::HashMap;
use std::sync::Arc;

use crate::api::node_class::SubnetStatus;
use crate::cloud::Override;
use crate::scheduling::offering::{CapacityType, Catalogue, InstanceType};

/// How long a mark lasts, milliseconds.
pub const TTL_MS: i64 = 180_000;

/// A mark's subject.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Subject {
    /// An offering; in a placement group where the second says so.
    Offering(Override, Option<String>),
    /// Every offering of a capacity type.
    CapacityType(CapacityType),
    /// A subnet without free addresses.
    Subnet(String),
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

    /// Whether an offering is not to be tried at `now_ms`. `subnets` are those of its zone that a node class has: when all of
    /// them are marked, the zone has no addresses. Zones without subnets are not judged here.
    pub fn covers(&self, offering: &Override, group: Option<&str>, subnets: &[&str], now_ms: i64) -> bool {
        self.holds(&Subject::CapacityType(offering.capacity_type), now_ms)
            || self.holds(&Subject::Offering(offering.clone(), None), now_ms)
            || group.is_some_and(|group| self.holds(&Subject::Offering(offering.clone(), Some(group.into())), now_ms))
            || (!subnets.is_empty()
                && subnets.iter().all(|subnet| self.holds(&Subject::Subnet((*subnet).to_owned()), now_ms)))
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

    /// The catalogue with marked offerings unavailable. Instance types without a marked offering are shared with `catalogue`.
    pub fn mask(
        &self,
        catalogue: &Catalogue,
        subnets: &[SubnetStatus],
        group: Option<&str>,
        now_ms: i64,
    ) -> Catalogue {
        let mut by_zone: HashMap<&str, Vec<&str>> = HashMap::new();
        for subnet in subnets {
            by_zone.entry(&subnet.zone).or_default().push(&subnet.id);
        }
        let covered = |found: &InstanceType, zone: &str, capacity_type: CapacityType| {
            let offering = Override { instance_type: found.name.to_string(), zone: zone.to_owned(), capacity_type };
            self.covers(&offering, group, by_zone.get(zone).map_or(&[], Vec::as_slice), now_ms)
        };
        let mask = |found: &Arc<InstanceType>| {
            let marked: Vec<bool> = found
                .offerings
                .iter()
                .map(|offering| offering.available && covered(found, &offering.zone, offering.capacity_type))
                .collect();
            if !marked.contains(&true) {
                return Arc::clone(found);
            }
            let mut masked = InstanceType::clone(found);
            for (offering, marked) in masked.offerings.iter_mut().zip(marked) {
                offering.available &= !marked;
            }
            Arc::new(masked)
        };
        Catalogue {
            region: catalogue.region.clone(),
            instance_types: if self.until.values().all(|until| *until <= now_ms) {
                catalogue.instance_types.clone()
            } else {
                catalogue.instance_types.iter().map(mask).collect()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::catalogue::{SpotPricing, embedded};

    fn offering(instance_type: &str, zone: &str, capacity_type: CapacityType) -> Override {
        Override { instance_type: instance_type.into(), zone: zone.into(), capacity_type }
    }

    fn subnet(id: &str, zone: &str) -> SubnetStatus {
        SubnetStatus { id: id.into(), zone: zone.into(), zone_id: None }
    }

    #[test]
    fn c11_one_offering_is_masked_for_three_minutes_and_other_types_are_shared() {
        let all = embedded().for_node_class(None, SpotPricing::ratio(0.4).unwrap());
        let mut marks = Unavailable::default();
        let out = offering("m5.xlarge", "us-east-1a", CapacityType::Spot);
        assert!(marks.mark(Subject::Offering(out.clone(), None), 1_000));
        assert!(!marks.mark(Subject::Offering(out, None), 2_000), "marked again: only its end moves");
        let masked = marks.mask(&all, &[], None, 2_000);
        for (before, after) in all.instance_types.iter().zip(&masked.instance_types) {
            if &*before.name == "m5.xlarge" {
                for offering in &after.offerings {
                    let marked = &*offering.zone == "us-east-1a" && offering.capacity_type == CapacityType::Spot;
                    assert_eq!(offering.available, !marked, "{offering:?}");
                }
            } else {
                assert!(Arc::ptr_eq(before, after), "{} was made anew", before.name);
            }
        }
        assert_eq!(marks.mask(&all, &[], None, 2_000 + TTL_MS), all, "available again");
        let before = marks.prune(2_000 + TTL_MS - 1);
        assert_eq!(marks.prune(2_000 + TTL_MS), before + 1, "an end is a change");
        assert_eq!(marks.prune(2_000 + TTL_MS), before + 1);
    }

    #[test]
    fn c13_a_capacity_type_is_marked_as_a_whole() {
        let mut marks = Unavailable::default();
        marks.mark(Subject::CapacityType(CapacityType::Spot), 0);
        assert!(marks.covers(&offering("m5.large", "a", CapacityType::Spot), None, &[], TTL_MS - 1));
        assert!(!marks.covers(&offering("m5.large", "a", CapacityType::OnDemand), None, &[], 1));
        assert!(!marks.covers(&offering("m5.large", "a", CapacityType::Spot), None, &[], TTL_MS));
    }

    #[test]
    fn c15_a_zone_is_out_of_addresses_when_all_its_subnets_are() {
        let mut marks = Unavailable::default();
        marks.mark(Subject::Subnet("subnet-1".into()), 0);
        let any = offering("m5.large", "a", CapacityType::OnDemand);
        assert!(marks.covers(&any, None, &["subnet-1"], 1));
        assert!(!marks.covers(&any, None, &["subnet-1", "subnet-2"], 1));
        assert!(!marks.covers(&any, None, &[], 1));
        let all = embedded().for_node_class(None, SpotPricing::Off);
        let zones = [subnet("subnet-1", "us-east-1a"), subnet("subnet-2", "us-east-1b")];
        let masked = marks.mask(&all, &zones, None, 1);
        for offering in masked.instance_types.iter().flat_map(|found| &found.offerings) {
            assert_eq!(offering.available, &*offering.zone != "us-east-1a");
        }
    }

    #[test]
    fn a_mark_made_in_a_placement_group_counts_there_only() {
        let mut marks = Unavailable::default();
        let any = offering("m5.large", "a", CapacityType::OnDemand);
        marks.mark(Subject::Offering(any.clone(), Some("pg-1".into())), 0);
        assert!(marks.covers(&any, Some("pg-1"), &[], 1));
        assert!(!marks.covers(&any, Some("pg-2"), &[], 1));
        assert!(!marks.covers(&any, None, &[], 1));
    }
}
