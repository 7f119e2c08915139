//! Spot placement scores by instance type and zone, and the groups of instance types that one request scores together.
//!
//! EC2 scores a request for at least three instance types and allows few distinct requests a day. The region's types are
//! therefore put into a few stable groups (category and architecture); a zone's score applies to every type of the group.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use aws_sdk_ec2::types::SpotPlacementScore;
use stowage_model::time::UnixMillis;

use crate::catalog::{RawInstanceType, architecture};

/// Age at which scores that could not be refreshed are dropped.
const MAX_AGE: Duration = Duration::from_hours(1);
/// Maximum number of groups, and so of requests, of a region.
const MAX_GROUPS: usize = 8;
/// EC2 scores a request for fewer types low.
const MIN_TYPES: usize = 3;
/// Maximum number of types in a request.
const MAX_TYPES: usize = 1000;

/// Parameters of score requests and of their evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreSettings {
    /// A score below this one counts against an offering; from 1 (none does) to 10.
    pub threshold: u8,
    /// Target capacity of a request in vCPUs. EC2 counts every distinct number as a new request, so it does not follow demand.
    pub target_vcpus: i32,
}

impl Default for ScoreSettings {
    /// 7 of 10, for 64 vCPUs.
    fn default() -> Self {
        Self { threshold: 7, target_vcpus: 64 }
    }
}

/// Instance types that are scored together, by the name of their group.
pub type Groups = BTreeMap<String, Vec<String>>;

/// The groups of a region with the most types, each with its types in order of name.
pub fn groups(types: &BTreeMap<String, RawInstanceType>) -> Groups {
    let mut groups = Groups::new();
    for entry in types.values() {
        if let Some(group) = group_of(entry) {
            groups.entry(group).or_default().push(entry.name.clone());
        }
    }
    let mut largest: Vec<_> = groups.into_iter().filter(|(_, names)| names.len() >= MIN_TYPES).collect();
    largest.sort_by_key(|(group, names)| (Reverse(names.len()), group.clone()));
    largest.truncate(MAX_GROUPS);
    for (_, names) in &mut largest {
        names.truncate(MAX_TYPES);
    }
    largest.into_iter().collect()
}

/// Such as `c/arm64`; `None` for types without spot capacity, and for bare-metal and previous-generation types, whose scarcity
/// differs.
fn group_of(entry: &RawInstanceType) -> Option<String> {
    let spot = entry.usage_classes.iter().any(|class| class == "spot");
    if !spot || entry.bare_metal || !entry.current_generation {
        return None;
    }
    let category: String = entry.name.chars().take_while(char::is_ascii_lowercase).collect();
    Some(format!("{category}/{}", architecture(entry)?))
}

/// Scores by group and zone name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScoreTable {
    group_by_type: BTreeMap<String, String>,
    scores: BTreeMap<String, BTreeMap<String, u8>>,
    read_at: UnixMillis,
}

impl ScoreTable {
    /// A table without scores, for the types of these groups.
    pub fn new(groups: &Groups, read_at: UnixMillis) -> Self {
        let group_by_type =
            groups.iter().flat_map(|(group, names)| names.iter().map(|name| (name.clone(), group.clone()))).collect();
        Self { group_by_type, scores: BTreeMap::new(), read_at }
    }

    /// Adds the scores of a group. `zone_ids` are ids by zone name; a score of an unknown zone or outside 1 to 10 is skipped.
    pub fn add(&mut self, group: &str, scores: &[SpotPlacementScore], zone_ids: &BTreeMap<String, String>) {
        let zones = self.scores.entry(group.to_owned()).or_default();
        for score in scores {
            let named = zone_ids.iter().find(|(_, id)| Some(id.as_str()) == score.availability_zone_id());
            let points =
                score.score().and_then(|score| u8::try_from(score).ok()).filter(|score| (1..=10).contains(score));
            if let (Some((zone, _)), Some(points)) = (named, points) {
                zones.insert(zone.clone(), points);
            }
        }
    }

    /// The score of an instance type in a zone; `None` for scores older than an hour.
    pub fn score(&self, instance_type: &str, zone: &str, now: UnixMillis) -> Option<u8> {
        if now.saturating_since(self.read_at) > MAX_AGE {
            return None;
        }
        self.scores.get(self.group_by_type.get(instance_type)?)?.get(zone).copied()
    }

    /// Number of scores.
    pub fn len(&self) -> usize {
        self.scores.values().map(BTreeMap::len).sum()
    }
}

#[cfg(test)]
mod tests;
