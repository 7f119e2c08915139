//! Zonal shifts of Amazon Application Recovery Controller (ARC). Until a shift ends, nothing is launched in the zone, and EC2 is
//! not called for instances there. Shifts that AWS starts (zonal autoshift) count like shifts of operators.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use aws_sdk_arczonalshift::types::{AppliedStatus, AutoshiftAppliedStatus, AutoshiftInResource, ZonalShiftInResource};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::OptionalApi;
use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::failing_apis::DegradedApis;

/// Interval of calls to ARC.
const PERIOD: Duration = Duration::from_secs(30);
/// How long an autoshift stays active after it was last read: it has no expiry, and ends by its absence from a response.
const AUTOSHIFT_TERM: Duration = Duration::from_hours(1);

/// The zone name in a provider id; `None` where it has none.
pub fn zone_of(provider_id: &str) -> Option<&str> {
    let (_, path) = provider_id.split_once("://")?;
    let (zone, _) = path.trim_start_matches('/').rsplit_once('/')?;
    Some(zone).filter(|zone| !zone.is_empty())
}

/// The active shifts.
#[derive(Debug, Default)]
pub struct ZonalShifts {
    state: Mutex<ShiftState>,
}

#[derive(Debug, Default)]
struct ShiftState {
    /// When each shift expires, by zone id.
    expires_at: BTreeMap<String, UnixMillis>,
    /// Zone ids by zone name.
    zone_ids: BTreeMap<String, String>,
}

impl ShiftState {
    fn is_shifted(&self, zone_id: &str, now: UnixMillis) -> bool {
        self.expires_at.get(zone_id).is_some_and(|expiry| *expiry > now)
    }
}

impl ZonalShifts {
    /// Adds zone ids, as pairs of zone name and zone id.
    pub fn record_zone_ids<'a>(&self, zones: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let mut state = lock(&self.state);
        for (zone, id) in zones {
            if state.zone_ids.get(zone).is_none_or(|other| other != id) {
                state.zone_ids.insert(zone.to_owned(), id.to_owned());
            }
        }
    }

    /// Replaces the active shifts: their expiries by zone id.
    pub fn set_active(&self, expires_at: BTreeMap<String, UnixMillis>) {
        lock(&self.state).expires_at = expires_at;
    }

    /// Ids of the zones that are shifted away from.
    pub fn shifted_zone_ids(&self, now: UnixMillis) -> BTreeSet<String> {
        let state = lock(&self.state);
        state.expires_at.keys().filter(|id| state.is_shifted(id, now)).cloned().collect()
    }

    /// Names of the zones that are shifted away from, as far as the names are known.
    pub fn shifted_zones(&self, now: UnixMillis) -> BTreeSet<String> {
        let state = lock(&self.state);
        state.zone_ids.iter().filter(|(_, id)| state.is_shifted(id, now)).map(|(zone, _)| zone.clone()).collect()
    }

    /// Whether a zone, by name, is shifted away from.
    pub fn is_shifted(&self, zone: &str, now: UnixMillis) -> bool {
        let state = lock(&self.state);
        state.zone_ids.get(zone).is_some_and(|id| state.is_shifted(id, now))
    }
}

/// The expiry of each applied shift by zone id; the latest one where a zone has several.
fn applied(
    shifts: &[ZonalShiftInResource],
    autoshifts: &[AutoshiftInResource],
    now: UnixMillis,
) -> BTreeMap<String, UnixMillis> {
    let shifts = shifts
        .iter()
        .filter(|shift| *shift.applied_status() == AppliedStatus::Applied)
        .map(|shift| (shift.away_from(), shift.expiry_time().to_millis().map_or(UnixMillis::MAX, UnixMillis)));
    let applied = autoshifts.iter().filter(|shift| *shift.applied_status() == AutoshiftAppliedStatus::Applied);
    let autoshifts = applied.map(|shift| (shift.away_from(), now + AUTOSHIFT_TERM));
    let mut out: BTreeMap<String, UnixMillis> = BTreeMap::new();
    for (zone_id, expiry) in shifts.chain(autoshifts) {
        let latest = out.entry(zone_id.to_owned()).or_insert(expiry);
        *latest = expiry.max(*latest);
    }
    out
}

/// Reads the shifts of the cluster from ARC until the process ends. A failure is logged once; known shifts stay until they expire.
pub async fn watch(clients: &AwsClients, cluster: &str, shifts: &ZonalShifts, degraded: &DegradedApis) {
    let mut arn = None;
    let mut failing = false;
    loop {
        match fetch(clients, cluster, &mut arn, clock::now()).await {
            Ok(active) => {
                if failing {
                    tracing::info!("zonal shifts readable again");
                }
                failing = false;
                degraded.record_recovery(OptionalApi::ZonalShifts);
                let before = shifts.shifted_zone_ids(clock::now());
                shifts.set_active(active);
                let after = shifts.shifted_zone_ids(clock::now());
                if before != after {
                    tracing::warn!(zones = ?after, "zonal shifts changed");
                }
            }
            Err(error) => {
                if !failing && error.class == Class::NotFound {
                    tracing::error!(cluster, %error, "the cluster is not registered for zonal shift, or not in EKS: register it, or set ENABLE_ZONAL_SHIFT=false");
                } else if !failing {
                    tracing::error!(%error, "could not read zonal shifts, known ones stay until they expire");
                }
                failing = true;
                let what = if error.class == Class::NotFound {
                    "the cluster is not registered for zonal shift, or not in EKS"
                } else {
                    "known zonal shifts stay until they expire, new ones are not detected"
                };
                degraded.record_failure(OptionalApi::ZonalShifts, format!("{what}: {error}"));
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}

async fn fetch(
    clients: &AwsClients,
    cluster: &str,
    arn: &mut Option<String>,
    now: UnixMillis,
) -> Result<BTreeMap<String, UnixMillis>, ApiError> {
    let arn = match arn {
        Some(arn) => arn,
        None => arn.insert(arn_of(clients, cluster).await?),
    };
    let call = clients.arc.get_managed_resource().resource_identifier(&*arn);
    let response = call.send().await.map_err(ApiError::of("arc-zonal-shift:GetManagedResource"))?;
    Ok(applied(response.zonal_shifts(), response.autoshifts(), now))
}

async fn arn_of(clients: &AwsClients, cluster: &str) -> Result<String, ApiError> {
    const ACTION: &str = "eks:DescribeCluster";
    let response = clients.eks.describe_cluster().name(cluster).send().await.map_err(ApiError::of(ACTION))?;
    let arn = response.cluster().and_then(|cluster| cluster.arn()).map(str::to_owned);
    arn.ok_or_else(|| ApiError {
        action: ACTION,
        code: String::new(),
        message: "the cluster has no ARN".into(),
        class: Class::NotFound,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures::StreamExt;

    use super::*;
    use crate::ec2::launch::request::tests::facts;
    use crate::ec2::{Ec2Provider, Options};
    use crate::test_support::fake_aws;
    use crate::{Cloud, InstanceTagging, Untagged};

    #[test]
    fn the_zone_is_read_from_a_provider_id() {
        for (provider_id, zone) in
            [("aws:///us-east-1a/i-1", Some("us-east-1a")), ("aws:///i-1", None), ("us-east-1a/i-1", None)]
        {
            assert_eq!(zone_of(provider_id), zone, "{provider_id}");
        }
    }

    #[tokio::test]
    async fn c40_applied_shifts_are_active_until_they_expire_or_are_canceled() {
        let shift = |zone: &str, status: &str, expiry: i64| {
            serde_json::json!({"appliedStatus": status, "zonalShiftId": "s", "resourceIdentifier": "arn", "awayFrom": zone,
                "expiryTime": expiry, "startTime": 0, "comment": "c"})
        };
        let list = [
            shift("use1-az1", "APPLIED", 100),
            shift("use1-az2", "NOT_APPLIED", 100),
            shift("use1-az1", "APPLIED", 90),
        ];
        let response = serde_json::json!({"zonalShifts": list}).to_string();
        let (clients, _) = fake_aws::clients(Box::new(move |_| Some((200, response.clone()))));
        let mut arn = Some("arn:aws:eks:us-east-1:1:cluster/c1".to_owned());
        let active = fetch(&clients, "c1", &mut arn, UnixMillis(0)).await.unwrap();
        let expiry = UnixMillis(100_000);
        assert_eq!(active, [("use1-az1".to_owned(), expiry)].into());
        let shifts = ZonalShifts::default();
        shifts.record_zone_ids([("us-east-1a", "use1-az1"), ("us-east-1b", "use1-az2")]);
        shifts.set_active(active);
        let before = expiry - Duration::from_millis(1);
        assert_eq!(shifts.shifted_zones(before), ["us-east-1a".to_owned()].into());
        assert!(shifts.is_shifted("us-east-1a", before) && !shifts.is_shifted("us-east-1b", before));
        assert!(shifts.shifted_zones(expiry).is_empty() && shifts.shifted_zone_ids(expiry).is_empty(), "expired");
        shifts.set_active(BTreeMap::new());
        assert!(!shifts.is_shifted("us-east-1a", before), "canceled");
    }

    #[tokio::test]
    async fn an_applied_autoshift_is_active_until_it_disappears() {
        let autoshift =
            |zone: &str, status: &str| serde_json::json!({"appliedStatus": status, "awayFrom": zone, "startTime": 0});
        let list = [autoshift("use1-az1", "APPLIED"), autoshift("use1-az2", "NOT_APPLIED")];
        let response = serde_json::json!({"zonalShifts": [], "autoshifts": list}).to_string();
        let (clients, _) = fake_aws::clients(Box::new(move |_| Some((200, response.clone()))));
        let mut arn = Some("arn:aws:eks:us-east-1:1:cluster/c1".to_owned());
        let now = UnixMillis(1_000);
        let active = fetch(&clients, "c1", &mut arn, now).await.unwrap();
        assert_eq!(active, [("use1-az1".to_owned(), now + AUTOSHIFT_TERM)].into());
        assert!(applied(&[], &[], now).is_empty());
    }

    #[tokio::test]
    async fn c40_ec2_is_not_called_for_instances_in_a_shifted_zone() {
        let is_seen = Arc::new(AtomicBool::new(true));
        let seen_now = Arc::clone(&is_seen);
        let (clients, calls) = fake_aws::clients(Box::new(move |request| {
            assert_eq!(request.action, "DescribeInstances");
            let instance = "<item><instancesSet><item><instanceId>i-1</instanceId><instanceType>m5.large</instanceType>\
                <instanceState><name>running</name></instanceState><placement><availabilityZone>us-east-1a</availabilityZone></placement>\
                </item></instancesSet></item>";
            let items = if seen_now.load(Ordering::SeqCst) { instance } else { "" };
            fake_aws::ok("DescribeInstances", &format!("<reservationSet>{items}</reservationSet>"))
        }));
        let ec2 = Ec2Provider::new(clients, Options::of("c1"), facts());
        assert_eq!(ec2.list().await.unwrap().len(), 1);
        ec2.offerings.shifts().record_zone_ids([("us-east-1a", "use1-az1")]);
        ec2.offerings.shifts().set_active([("use1-az1".to_owned(), UnixMillis::MAX)].into());
        let id = "aws:///us-east-1a/i-1";
        let before = calls.lock().unwrap().len();
        assert!(ec2.describe(id).await.unwrap().is_some(), "as it was last listed");
        let error = ec2.terminate(id).await.unwrap_err().to_string();
        assert!(error.contains("zone us-east-1a has an active zonal shift"), "{error}");
        let due = [Untagged { provider_id: id.into(), node: "node".into(), claim: "claim".into() }];
        assert!(ec2.tag(&due).next().await.unwrap().1.is_err());
        ec2.describe("aws:///us-east-1a/i-2").await.unwrap_err();
        assert_eq!(calls.lock().unwrap().len(), before, "EC2 was not called");
        is_seen.store(false, Ordering::SeqCst);
        assert_eq!(ec2.list().await.unwrap().len(), 1, "kept although EC2 does not list it");
        ec2.offerings.shifts().set_active(BTreeMap::new());
        assert!(ec2.list().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn the_cluster_is_described_once() {
        let (clients, seen) = fake_aws::clients(Box::new(|_| {
            let body = serde_json::json!({"cluster": {"arn": "arn:aws:eks:us-east-1:1:cluster/c1"}, "zonalShifts": []});
            Some((200, body.to_string()))
        }));
        let mut arn = None;
        for _ in 0..2 {
            assert!(fetch(&clients, "c1", &mut arn, UnixMillis(0)).await.unwrap().is_empty());
        }
        assert_eq!((arn.as_deref(), seen.lock().unwrap().len()), (Some("arn:aws:eks:us-east-1:1:cluster/c1"), 3));
    }
}
