//! Zones that the cluster is shifted away from by Amazon Application Recovery Controller: nothing is launched there, and EC2 is
//! not called about what runs there, until the shift ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use aws_sdk_arczonalshift::types::{AppliedStatus, ZonalShiftInResource};

use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::degraded_apis;
use crate::cloud::ec2::degraded_apis::Troubles;
use crate::sync::lock;

/// How often ARC is asked.
const PERIOD: Duration = Duration::from_secs(30);

/// The zone name in a provider id; `None` where it names none.
pub fn zone_of(provider_id: &str) -> Option<&str> {
    let (_, path) = provider_id.split_once("://")?;
    let (zone, _) = path.trim_start_matches('/').rsplit_once('/')?;
    Some(zone).filter(|zone| !zone.is_empty())
}

/// The shifts that hold.
#[derive(Debug, Default)]
pub struct Shifts {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// When each shift ends by itself, milliseconds since the epoch, by zone id.
    until: BTreeMap<String, i64>,
    /// Zone ids by zone name.
    ids: BTreeMap<String, String>,
}

impl Shifts {
    fn known(&self) -> MutexGuard<'_, Known> {
        lock(&self.known)
    }

    /// Takes in zones, by name with their ids.
    pub fn know_zones<'a>(&self, zones: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let mut known = self.known();
        for (zone, id) in zones {
            if known.ids.get(zone).is_none_or(|other| other != id) {
                known.ids.insert(zone.to_owned(), id.to_owned());
            }
        }
    }

    /// Takes in what ARC says now, which replaces what it said before.
    pub fn replace(&self, until: BTreeMap<String, i64>) {
        self.known().until = until;
    }

    /// Ids of the zones that are shifted away from.
    pub fn zone_ids(&self, now_ms: i64) -> BTreeSet<String> {
        let known = self.known();
        known.until.iter().filter(|(_, until)| **until > now_ms).map(|(id, _)| id.clone()).collect()
    }

    /// Names of the zones that are shifted away from, as far as they are known.
    pub fn zones(&self, now_ms: i64) -> BTreeSet<String> {
        let known = self.known();
        let away = |id: &String| known.until.get(id).is_some_and(|until| *until > now_ms);
        known.ids.iter().filter(|(_, id)| away(id)).map(|(zone, _)| zone.clone()).collect()
    }

    /// Whether a zone, by name, is shifted away from.
    pub fn is_away_from(&self, zone: &str, now_ms: i64) -> bool {
        let known = self.known();
        known.ids.get(zone).and_then(|id| known.until.get(id)).is_some_and(|until| *until > now_ms)
    }
}

/// The end of each shift that is applied, milliseconds since the epoch, by zone id; of several of a zone the last.
fn applied(shifts: &[ZonalShiftInResource]) -> BTreeMap<String, i64> {
    let mut out: BTreeMap<String, i64> = BTreeMap::new();
    for shift in shifts.iter().filter(|shift| *shift.applied_status() == AppliedStatus::Applied) {
        let until = shift.expiry_time().to_millis().unwrap_or(i64::MAX);
        let known = out.entry(shift.away_from().to_owned()).or_insert(until);
        *known = until.max(*known);
    }
    out
}

/// Asks ARC for the shifts of the cluster until the process ends. A failure is told once, and what was known stays to its end.
pub async fn watch(clients: &Clients, cluster: &str, shifts: &Shifts, troubles: &Troubles) {
    let mut arn = None;
    let mut failing = false;
    loop {
        match ask(clients, cluster, &mut arn).await {
            Ok(until) => {
                if failing {
                    tracing::info!("zonal shifts are known again");
                }
                failing = false;
                troubles.end(degraded_apis::SHIFTS);
                let before = shifts.zone_ids(crate::clock::now().0);
                shifts.replace(until);
                let after = shifts.zone_ids(crate::clock::now().0);
                if before != after {
                    tracing::warn!(zones = ?after, "zones that the cluster is shifted away from");
                }
            }
            Err(error) => {
                if !failing && error.class == Class::NotFound {
                    tracing::error!(cluster, %error, "the cluster is not registered for zonal shift, or not in EKS: register it, or set ENABLE_ZONAL_SHIFT=false");
                } else if !failing {
                    tracing::error!(%error, "zonal shifts are not known, those known so far hold until they end");
                }
                failing = true;
                let what = if error.class == Class::NotFound {
                    "the cluster is not registered for zonal shift, or not in EKS"
                } else {
                    "zonal shifts known so far hold until they end, others are not seen"
                };
                troubles.begin(degraded_apis::SHIFTS, format!("{what}: {error}"));
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}

async fn ask(clients: &Clients, cluster: &str, arn: &mut Option<String>) -> Result<BTreeMap<String, i64>, ApiError> {
    let known = match arn {
        Some(known) => known,
        None => arn.insert(arn_of(clients, cluster).await?),
    };
    let call = clients.arc.get_managed_resource().resource_identifier(&*known);
    let answer = call.send().await.map_err(ApiError::of("arc-zonal-shift:GetManagedResource"))?;
    Ok(applied(answer.zonal_shifts()))
}

async fn arn_of(clients: &Clients, cluster: &str) -> Result<String, ApiError> {
    const ACTION: &str = "eks:DescribeCluster";
    let answer = clients.eks.describe_cluster().name(cluster).send().await.map_err(ApiError::of(ACTION))?;
    let arn = answer.cluster().and_then(|cluster| cluster.arn()).map(str::to_owned);
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
    use crate::cloud::ec2::aws::client::wire;
    use crate::cloud::ec2::launch::request::tests::facts;
    use crate::cloud::ec2::{Ec2Provider, Options};
    use crate::cloud::{Cloud, InstanceTagging, Untagged};

    #[test]
    fn zones_are_read_off_provider_ids() {
        for (provider_id, zone) in
            [("aws:///us-east-1a/i-1", Some("us-east-1a")), ("aws:///i-1", None), ("us-east-1a/i-1", None)]
        {
            assert_eq!(zone_of(provider_id), zone, "{provider_id}");
        }
    }

    #[tokio::test]
    async fn c40_applied_shifts_hold_until_they_end_or_are_cancelled() {
        let shift = |zone: &str, status: &str, expiry: i64| {
            serde_json::json!({"appliedStatus": status, "zonalShiftId": "s", "resourceIdentifier": "arn", "awayFrom": zone,
                "expiryTime": expiry, "startTime": 0, "comment": "c"})
        };
        let list = [
            shift("use1-az1", "APPLIED", 100),
            shift("use1-az2", "NOT_APPLIED", 100),
            shift("use1-az1", "APPLIED", 90),
        ];
        let answer = serde_json::json!({"zonalShifts": list}).to_string();
        let (clients, _) = wire::clients(Box::new(move |_| Some((200, answer.clone()))));
        let mut arn = Some("arn:aws:eks:us-east-1:1:cluster/c1".to_owned());
        let until = ask(&clients, "c1", &mut arn).await.unwrap();
        assert_eq!(until, [("use1-az1".to_owned(), 100_000)].into());
        let shifts = Shifts::default();
        shifts.know_zones([("us-east-1a", "use1-az1"), ("us-east-1b", "use1-az2")]);
        shifts.replace(until);
        assert_eq!(shifts.zones(99_999), ["us-east-1a".to_owned()].into());
        assert!(shifts.is_away_from("us-east-1a", 99_999) && !shifts.is_away_from("us-east-1b", 99_999));
        assert!(shifts.zones(100_000).is_empty() && shifts.zone_ids(100_000).is_empty(), "it ends by itself");
        shifts.replace(BTreeMap::new());
        assert!(!shifts.is_away_from("us-east-1a", 0), "cancelled");
    }

    #[tokio::test]
    async fn c40_what_runs_in_a_zone_that_is_shifted_away_from_is_left_alone_and_not_forgotten() {
        let is_seen = Arc::new(AtomicBool::new(true));
        let seen_now = Arc::clone(&is_seen);
        let (clients, calls) = wire::clients(Box::new(move |request| {
            assert_eq!(request.action, "DescribeInstances");
            let instance = "<item><instancesSet><item><instanceId>i-1</instanceId><instanceType>m5.large</instanceType>\
                <instanceState><name>running</name></instanceState><placement><availabilityZone>us-east-1a</availabilityZone></placement>\
                </item></instancesSet></item>";
            let items = if seen_now.load(Ordering::SeqCst) { instance } else { "" };
            wire::ok("DescribeInstances", &format!("<reservationSet>{items}</reservationSet>"))
        }));
        let ec2 = Ec2Provider::new(clients, Options::of("c1"), facts());
        assert_eq!(ec2.list().await.unwrap().len(), 1);
        ec2.shifts().know_zones([("us-east-1a", "use1-az1")]);
        ec2.shifts().replace([("use1-az1".to_owned(), i64::MAX)].into());
        let id = "aws:///us-east-1a/i-1";
        let before = calls.lock().unwrap().len();
        assert!(ec2.describe(id).await.unwrap().is_some(), "as it was last seen");
        let error = ec2.terminate(id).await.unwrap_err().to_string();
        assert!(error.contains("us-east-1a is shifted away from"), "{error}");
        let due = [Untagged { provider_id: id.into(), node: "node".into(), claim: "claim".into() }];
        assert!(ec2.tag(&due).next().await.unwrap().1.is_err());
        ec2.describe("aws:///us-east-1a/i-2").await.unwrap_err();
        assert_eq!(calls.lock().unwrap().len(), before, "EC2 was not called");
        is_seen.store(false, Ordering::SeqCst);
        assert_eq!(ec2.list().await.unwrap().len(), 1, "kept though EC2 does not list it");
        ec2.shifts().replace(BTreeMap::new());
        assert!(ec2.list().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn the_cluster_is_looked_up_once() {
        let (clients, seen) = wire::clients(Box::new(|_| {
            let body = serde_json::json!({"cluster": {"arn": "arn:aws:eks:us-east-1:1:cluster/c1"}, "zonalShifts": []});
            Some((200, body.to_string()))
        }));
        let mut arn = None;
        for _ in 0..2 {
            assert!(ask(&clients, "c1", &mut arn).await.unwrap().is_empty());
        }
        assert_eq!((arn.as_deref(), seen.lock().unwrap().len()), (Some("arn:aws:eks:us-east-1:1:cluster/c1"), 3));
    }
}
