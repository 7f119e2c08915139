//! Spot placement scores: how likely EC2 thinks it is that a spot request succeeds in a zone, from 1 to 10.
//!
//! EC2 scores a request for *several* instance types, at least three, and allows few new requests a day. So the types of a
//! region are put into a few groups that stay the same (category and architecture), each group is one request with a fixed
//! target, and a zone's score holds for all types of the group.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_ec2::Client;
use aws_sdk_ec2::types::{SpotPlacementScore, TargetCapacityUnitType};
use tracing::{info, warn};

use crate::cloud::catalog::{RawInstanceType, architecture};
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::degraded_apis;
use crate::cloud::ec2::degraded_apis::Troubles;
use crate::cloud::ec2::offerings::region::{Region, RegionSnapshot};
use crate::cloud::ec2::offerings::spot_risk::SpotRisk;

const SCORES: &str = "ec2:GetSpotPlacementScores";
/// Time that scores hold.
pub const PERIOD: Duration = Duration::from_mins(15);
/// Age at which scores that could not be read anew are dropped, milliseconds.
const STALE_MS: i64 = 3_600_000;
/// EC2's code for too many different requests within 24 hours, and how long to wait then.
const TOO_MANY_REQUESTS: &str = "MaxConfigLimitExceeded";
const NEXT_DAY: Duration = Duration::from_hours(24);
/// Most groups, and so most requests, of a region.
const MOST_GROUPS: usize = 8;
/// Fewer types always score low.
const FEWEST_TYPES: usize = 3;
/// Most types that a request may name.
const MOST_TYPES: usize = 1000;

/// How scores are asked for and judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreSettings {
    /// A score below this one counts against an offering; from 1 (none does) to 10.
    pub threshold: u8,
    /// vCPUs that a request asks for. Any other number is another request to EC2, so it does not follow the demand.
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

/// The groups of a region: those with the most types, each with its types by name.
pub fn groups(types: &BTreeMap<String, RawInstanceType>) -> Groups {
    let mut all = Groups::new();
    for entry in types.values() {
        if let Some(group) = group_of(entry) {
            all.entry(group).or_default().push(entry.name.clone());
        }
    }
    let mut largest: Vec<_> = all.into_iter().filter(|(_, names)| names.len() >= FEWEST_TYPES).collect();
    largest.sort_by_key(|(group, names)| (Reverse(names.len()), group.clone()));
    largest.truncate(MOST_GROUPS);
    for (_, names) in &mut largest {
        names.truncate(MOST_TYPES);
    }
    largest.into_iter().collect()
}

/// As `c/arm64`; `None` for what is not sold as spot, and for metal and old types, which are scarce in another way.
fn group_of(entry: &RawInstanceType) -> Option<String> {
    let spot = entry.usage_classes.iter().any(|class| class == "spot");
    if !spot || entry.bare_metal || !entry.current_generation {
        return None;
    }
    let category: String = entry.name.chars().take_while(char::is_ascii_lowercase).collect();
    Some(format!("{category}/{}", architecture(entry)?))
}

/// Scores by zone name, by group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScoreTable {
    group_by_type: BTreeMap<String, String>,
    scores: BTreeMap<String, BTreeMap<String, u8>>,
    taken_at_ms: i64,
}

impl ScoreTable {
    /// A table without scores, for the types of some groups.
    pub fn new(groups: &Groups, taken_at_ms: i64) -> Self {
        let group_by_type =
            groups.iter().flat_map(|(group, names)| names.iter().map(|name| (name.clone(), group.clone()))).collect();
        Self { group_by_type, scores: BTreeMap::new(), taken_at_ms }
    }

    /// Takes in the scores of a group. `zone_ids` are ids by zone name; a score of an unknown zone or outside 1 to 10 is left
    /// out.
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

    /// The score of an instance type in a zone, while it is not stale.
    pub fn score(&self, instance_type: &str, zone: &str, now_ms: i64) -> Option<u8> {
        if now_ms.saturating_sub(self.taken_at_ms) > STALE_MS {
            return None;
        }
        self.scores.get(self.group_by_type.get(instance_type)?)?.get(zone).copied()
    }

    /// How many scores there are.
    pub fn len(&self) -> usize {
        self.scores.values().map(BTreeMap::len).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Asks for the scores of a region's groups, one after the other.
///
/// # Errors
/// A call fails. Scores read before it are lost.
pub async fn get_scores(
    ec2: &Client,
    snapshot: &RegionSnapshot,
    settings: &ScoreSettings,
    now_ms: i64,
) -> Result<ScoreTable, ApiError> {
    let groups = groups(&snapshot.types);
    let mut table = ScoreTable::new(&groups, now_ms);
    for (group, names) in &groups {
        let scores: Result<Vec<_>, _> = ec2
            .get_spot_placement_scores()
            .set_instance_types(Some(names.clone()))
            .target_capacity(settings.target_vcpus)
            .target_capacity_unit_type(TargetCapacityUnitType::Vcpu)
            .single_availability_zone(true)
            .region_names(&snapshot.region)
            .into_paginator()
            .items()
            .send()
            .collect()
            .await;
        table.add(group, &scores.map_err(ApiError::of(SCORES))?, &snapshot.zone_ids);
    }
    Ok(table)
}

/// What to do after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Never ask again.
    Stop,
    Wait(Duration),
}

fn after(error: &ApiError) -> Next {
    match error.class {
        Class::Unauthorized => Next::Stop,
        _ if error.code == TOO_MANY_REQUESTS => Next::Wait(NEXT_DAY),
        _ => Next::Wait(PERIOD),
    }
}

/// Keeps the scores of a region fresh, every 15 minutes, until the process ends or the API is refused: then spot goes on
/// without scores.
pub async fn keep_scoring(region: Arc<Region>, risk: Arc<SpotRisk>, ec2: Client, troubles: &Troubles) {
    let mut told = false;
    loop {
        let wait = match get_scores(&ec2, &region.snapshot(), &risk.settings(), crate::clock::now().0).await {
            Ok(table) => {
                if !told {
                    info!(scores = table.len(), "spot placement scores are read every 15 minutes");
                }
                told = true;
                troubles.end(degraded_apis::SCORES);
                risk.set_scores(table);
                PERIOD
            }
            Err(error) => match after(&error) {
                Next::Stop => {
                    warn!(%error, "spot placement scores are off until the next start");
                    let note = format!("spot is chosen without placement scores until the next start: {error}");
                    troubles.begin(degraded_apis::SCORES, note);
                    return;
                }
                Next::Wait(wait) => {
                    warn!(%error, next_try_in = ?wait, "spot placement scores could not be read");
                    told = false;
                    troubles.begin(
                        degraded_apis::SCORES,
                        format!("the last scores hold for an hour, then spot is chosen without: {error}"),
                    );
                    wait
                }
            },
        };
        tokio::time::sleep(wait).await;
    }
}

#[cfg(test)]
mod tests;
