//! Offerings, capacity types and subnets that EC2 recently could not provide. Each is skipped for three minutes.
//!
//! An entry covers one offering (type, zone and capacity type, within a placement group where the launch was in one), a whole
//! capacity type, or a subnet. Marking it again restarts the three minutes. Time is an argument.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::time::Duration;

use stowage_api::node_class::SubnetStatus;
use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;

use crate::Override;

/// How long an entry lasts.
pub const TTL: Duration = Duration::from_mins(3);

/// The scope of missing capacity.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CapacityScope {
    /// An offering; within a placement group or one of its partitions where the second member, a [`placement_scope`], is set.
    Offering(Override, Option<String>),
    /// Every offering of a capacity type.
    CapacityType(CapacityType),
    /// A subnet without free addresses.
    Subnet(String),
}

impl fmt::Display for CapacityScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Offering(Override { instance_type, zone, capacity_type }, group) => {
                write!(f, "{instance_type} in {zone}, {capacity_type}")?;
                group.as_ref().map_or(Ok(()), |group| write!(f, ", placement group {group}"))
            }
            Self::CapacityType(capacity_type) => write!(f, "all of {capacity_type}"),
            Self::Subnet(id) => write!(f, "{id} has no free addresses"),
        }
    }
}

/// Where in a placement group a launch was: the group, or one of its partitions.
pub fn placement_scope(group: &str, partition: Option<&str>) -> String {
    match partition {
        Some(partition) => format!("{group}/{partition}"),
        None => group.to_owned(),
    }
}

/// The unavailable scopes and when each entry expires.
#[derive(Clone, Debug, Default)]
pub struct UnavailableOfferings {
    expires_at: HashMap<CapacityScope, UnixMillis>,
    /// Incremented when an entry is added or expires; results derived from the entries are valid until then.
    version: u64,
}

impl UnavailableOfferings {
    /// Marks a scope as unavailable. Returns true when it was not unavailable before.
    pub fn mark(&mut self, scope: CapacityScope, now: UnixMillis) -> bool {
        let before = self.expires_at.insert(scope, now + TTL);
        let new = before.is_none_or(|expiry| expiry <= now);
        self.version += u64::from(new);
        new
    }

    fn contains(&self, scope: &CapacityScope, now: UnixMillis) -> bool {
        self.expires_at.get(scope).is_some_and(|expiry| *expiry > now)
    }

    /// Whether an offering is unavailable, within the placement group `group` where there is one. Subnets are not considered:
    /// see [`UnavailableOfferings::exhausted_zones`].
    pub fn is_unavailable(&self, offering: &Override, group: Option<&str>, now: UnixMillis) -> bool {
        if self.expires_at.is_empty() {
            return false;
        }
        let in_group = |group: &str| CapacityScope::Offering(offering.clone(), Some(group.into()));
        self.contains(&CapacityScope::CapacityType(offering.capacity_type), now)
            || self.contains(&CapacityScope::Offering(offering.clone(), None), now)
            || group.is_some_and(|group| self.contains(&in_group(group), now))
    }

    /// As [`UnavailableOfferings::is_unavailable`], and also whether it is unavailable in one partition of the group.
    pub fn is_unavailable_in_partition(
        &self,
        offering: &Override,
        group: Option<&str>,
        partition: Option<&str>,
        now: UnixMillis,
    ) -> bool {
        let in_partition = || {
            let scope = placement_scope(group?, Some(partition?));
            Some(self.contains(&CapacityScope::Offering(offering.clone(), Some(scope)), now))
        };
        self.is_unavailable(offering, group, now) || (!self.expires_at.is_empty() && in_partition().unwrap_or(false))
    }

    /// At most `most` entries with their ends, and the number of all.
    pub fn entries(&self, most: usize, now: UnixMillis) -> (Vec<(CapacityScope, UnixMillis)>, usize) {
        let entries = || self.expires_at.iter().filter(|(_, expiry)| **expiry > now);
        (entries().take(most).map(|(scope, expiry)| (scope.clone(), *expiry)).collect(), entries().count())
    }

    /// Drops expired entries. Returns a version that changes whenever the entries do.
    pub fn prune(&mut self, now: UnixMillis) -> u64 {
        let before = self.expires_at.len();
        self.expires_at.retain(|_, expiry| *expiry > now);
        if self.expires_at.len() != before {
            self.version += 1;
        }
        self.version
    }

    /// The zones in which every subnet of a class has no free addresses.
    pub fn exhausted_zones(&self, subnets: &[SubnetStatus], now: UnixMillis) -> BTreeSet<String> {
        let exhausted = |subnet: &SubnetStatus| self.contains(&CapacityScope::Subnet(subnet.id.clone()), now);
        let mut zones: BTreeSet<String> = subnets.iter().map(|subnet| subnet.zone.clone()).collect();
        for subnet in subnets.iter().filter(|subnet| !exhausted(subnet)) {
            zones.remove(&subnet.zone);
        }
        zones
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: UnixMillis = UnixMillis(0);
    const JUST_AFTER: UnixMillis = UnixMillis(1);

    fn offering(instance_type: &str, zone: &str, capacity_type: CapacityType) -> Override {
        Override { instance_type: instance_type.into(), zone: zone.into(), capacity_type }
    }

    fn subnet(id: &str, zone: &str) -> SubnetStatus {
        SubnetStatus { id: id.into(), zone: zone.into(), zone_id: None }
    }

    fn last_moment() -> UnixMillis {
        START + TTL - Duration::from_millis(1)
    }

    #[test]
    fn c11_one_offering_is_unavailable_for_three_minutes_and_no_other() {
        let mut unavailable = UnavailableOfferings::default();
        let out = offering("m5.xlarge", "a", CapacityType::Spot);
        assert!(unavailable.mark(CapacityScope::Offering(out.clone(), None), UnixMillis(-1_000)));
        assert!(!unavailable.mark(CapacityScope::Offering(out.clone(), None), START), "only its expiry changes");
        assert!(unavailable.is_unavailable(&out, None, last_moment()));
        assert!(!unavailable.is_unavailable(&out, None, START + TTL), "available again");
        for other in [
            offering("m5.xlarge", "b", CapacityType::Spot),
            offering("m5.xlarge", "a", CapacityType::OnDemand),
            offering("m5.large", "a", CapacityType::Spot),
        ] {
            assert!(!unavailable.is_unavailable(&other, None, START), "{other:?}");
        }
        let entries = unavailable.entries(1, last_moment());
        assert_eq!((entries.0[0].0.to_string().as_str(), entries.1), ("m5.xlarge in a, spot", 1));
        assert_eq!(unavailable.entries(0, last_moment()), (Vec::new(), 1));
        assert_eq!(unavailable.entries(9, START + TTL), (Vec::new(), 0));
        let before = unavailable.prune(last_moment());
        assert_eq!(unavailable.prune(START + TTL), before + 1, "an expiry is a change");
        assert_eq!(unavailable.prune(START + TTL), before + 1);
    }

    #[test]
    fn c13_a_capacity_type_is_unavailable_as_a_whole() {
        let mut unavailable = UnavailableOfferings::default();
        unavailable.mark(CapacityScope::CapacityType(CapacityType::Spot), START);
        assert!(unavailable.is_unavailable(&offering("m5.large", "a", CapacityType::Spot), None, last_moment()));
        assert!(!unavailable.is_unavailable(&offering("m5.large", "a", CapacityType::OnDemand), None, JUST_AFTER));
        assert!(!unavailable.is_unavailable(&offering("m5.large", "a", CapacityType::Spot), None, START + TTL));
    }

    #[test]
    fn c15_a_zone_is_out_of_addresses_when_all_its_subnets_are() {
        let mut unavailable = UnavailableOfferings::default();
        unavailable.mark(CapacityScope::Subnet("subnet-1".into()), START);
        let zones = |subnets: &[SubnetStatus], now| unavailable.exhausted_zones(subnets, now);
        let one = [subnet("subnet-1", "a"), subnet("subnet-3", "b")];
        assert_eq!(zones(&one, JUST_AFTER), BTreeSet::from(["a".to_owned()]));
        assert!(zones(&[subnet("subnet-1", "a"), subnet("subnet-2", "a")], JUST_AFTER).is_empty());
        assert!(zones(&[subnet("subnet-2", "a"), subnet("subnet-1", "a")], JUST_AFTER).is_empty());
        assert!(zones(&one, START + TTL).is_empty());
    }

    #[test]
    fn an_entry_of_a_placement_group_applies_to_that_group_only() {
        let mut unavailable = UnavailableOfferings::default();
        let any = offering("m5.large", "a", CapacityType::OnDemand);
        unavailable.mark(CapacityScope::Offering(any.clone(), Some("pg-1".into())), START);
        assert!(unavailable.is_unavailable(&any, Some("pg-1"), JUST_AFTER));
        assert!(!unavailable.is_unavailable(&any, Some("pg-2"), JUST_AFTER));
        assert!(!unavailable.is_unavailable(&any, None, JUST_AFTER));
        assert!(
            unavailable.is_unavailable_in_partition(&any, Some("pg-1"), Some("2"), JUST_AFTER),
            "in every partition"
        );
    }

    #[test]
    fn an_entry_of_a_partition_applies_to_that_partition_only() {
        let mut unavailable = UnavailableOfferings::default();
        let any = offering("m5.large", "a", CapacityType::OnDemand);
        unavailable.mark(CapacityScope::Offering(any.clone(), Some(placement_scope("pg-1", Some("2")))), START);
        let applies = |group, partition| unavailable.is_unavailable_in_partition(&any, group, partition, JUST_AFTER);
        assert!(applies(Some("pg-1"), Some("2")));
        assert!(!applies(Some("pg-1"), Some("1")) && !applies(Some("pg-1"), None) && !applies(Some("pg-2"), Some("2")));
    }
}
