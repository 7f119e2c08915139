//! Reads spot placement scores of the region every 15 minutes. A score says how likely EC2 expects a spot request to succeed in a
//! zone, from 1 to 10.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_ec2::Client;
use aws_sdk_ec2::types::TargetCapacityUnitType;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use tracing::{info, warn};

use crate::OptionalApi;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::failing_apis::DegradedApis;
use crate::ec2::offerings::placement_score_table::{ScoreSettings, ScoreTable, groups};
use crate::ec2::offerings::region::Region;
use crate::ec2::offerings::region_snapshot::RegionSnapshot;
use crate::ec2::offerings::spot_risk::SpotRisk;

const ACTION: &str = "ec2:GetSpotPlacementScores";
/// Interval of requests.
const PERIOD: Duration = Duration::from_mins(15);
/// Wait after too many distinct requests.
const TOO_MANY_REQUESTS_WAIT: Duration = Duration::from_hours(24);

/// Reads the scores of a region's groups, one after the other.
///
/// # Errors
/// The first error of a call; scores read before it are discarded.
pub async fn get_scores(
    ec2: &Client,
    snapshot: &RegionSnapshot,
    settings: &ScoreSettings,
    now: UnixMillis,
) -> Result<ScoreTable, ApiError> {
    let groups = groups(&snapshot.types);
    let mut table = ScoreTable::new(&groups, now);
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
        table.add(group, &scores.map_err(ApiError::of(ACTION))?, &snapshot.zone_ids);
    }
    Ok(table)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retry {
    Never,
    After(Duration),
}

fn retry(error: &ApiError) -> Retry {
    match error.class {
        Class::Unauthorized => Retry::Never,
        _ if error.is_daily_limit() => Retry::After(TOO_MANY_REQUESTS_WAIT),
        _ => Retry::After(PERIOD),
    }
}

/// Refreshes the scores of the region every 15 minutes until the process ends or the API is denied: spot offerings then have no
/// scores.
pub async fn keep_scoring(region: Arc<Region>, risk: Arc<SpotRisk>, ec2: Client, degraded: &DegradedApis) {
    let mut working = false;
    loop {
        let wait = match get_scores(&ec2, &region.snapshot(), &risk.settings(), clock::now()).await {
            Ok(table) => {
                if !working {
                    info!(scores = table.len(), "read spot placement scores, refreshing every 15 minutes");
                }
                working = true;
                degraded.record_recovery(OptionalApi::PlacementScores);
                risk.set_scores(table);
                PERIOD
            }
            Err(error) => match retry(&error) {
                Retry::Never => {
                    warn!(%error, "spot placement scores denied, disabled until the next start");
                    let note = format!("spot offerings have no placement scores until the next start: {error}");
                    degraded.record_failure(OptionalApi::PlacementScores, note);
                    return;
                }
                Retry::After(wait) => {
                    warn!(%error, retry_in = ?wait, "could not read spot placement scores");
                    working = false;
                    degraded.record_failure(
                        OptionalApi::PlacementScores,
                        format!("the last scores are used for an hour, then spot offerings have none: {error}"),
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
