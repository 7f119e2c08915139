//! Keeps what is known of the region fresh: at start, then every twelve hours, what failed sooner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{OptionFuture, join_all};
use tracing::{info, warn};

use crate::cloud::catalog::embedded;
use crate::cloud::ec2::offerings::region::{Answers, Part, Region};
use crate::cloud::ec2::offerings::{instance_types, prices, spot_prices};

/// Age at which everything is asked again.
const PERIOD: Duration = Duration::from_hours(12);
/// Wait before what failed is asked again; it doubles with each failure, to [`LONGEST_RETRY`].
const FIRST_RETRY: Duration = Duration::from_mins(1);
const LONGEST_RETRY: Duration = Duration::from_hours(1);

/// The APIs that tell of the region.
#[derive(Clone, Debug)]
pub struct Feeds {
    /// EC2.
    pub ec2: aws_sdk_ec2::Client,
    /// Pricing, in the region of [`prices::endpoint_region`]; `None` where it can't be asked (see
    /// [`prices::can_be_asked`]), and the table in the binary is all there is.
    pub pricing: Option<aws_sdk_pricing::Client>,
}

impl Feeds {
    /// Parts of the snapshot that these APIs tell.
    fn parts(&self) -> BTreeSet<Part> {
        Part::ALL.into_iter().filter(|part| *part != Part::OnDemandPrices || self.pricing.is_some()).collect()
    }

    /// Asks for some parts, side by side.
    pub async fn ask(&self, region: &str, parts: &BTreeSet<Part>, now_ms: i64) -> Answers {
        let wanted = |part: Part| parts.contains(&part).then_some(());
        let pricing = self.pricing.as_ref().filter(|_| parts.contains(&Part::OnDemandPrices));
        let (types, zones, on_demand, spot) = futures::join!(
            OptionFuture::from(wanted(Part::Types).map(|()| instance_types::describe_instance_types(&self.ec2))),
            OptionFuture::from(wanted(Part::Zones).map(|()| instance_types::describe_offerings(&self.ec2))),
            OptionFuture::from(pricing.map(|pricing| prices::get_products(pricing, region))),
            OptionFuture::from(wanted(Part::SpotPrices).map(|()| spot_prices::describe_spot_prices(&self.ec2, now_ms))),
        );
        let types = types.map(|answer| {
            answer.map(|infos| {
                let (usable, unusable) = instance_types::raw_instance_types(&infos, embedded());
                if let Some(first) = unusable.first() {
                    warn!(count = unusable.len(), %first, "instance types were left out, their descriptions can't be used");
                }
                usable
            })
        });
        let zones = zones.map(|answer| answer.map(|offerings| instance_types::zones_by_type(&offerings)));
        Answers { types, zones, on_demand, spot }
    }
}

/// Asks for some parts and takes each in as it comes. Says of each part that is answered no more, or again, one line.
pub async fn refresh(region: &Region, feeds: &Feeds, parts: &BTreeSet<Part>) {
    join_all(parts.iter().map(|part| refresh_part(region, feeds, *part))).await;
}

async fn refresh_part(region: &Region, feeds: &Feeds, part: Part) {
    let name = region.snapshot().region.clone();
    let answers = feeds.ask(&name, &BTreeSet::from([part]), crate::clock::now().0).await;
    for turn in region.learn(answers, crate::clock::now().0) {
        if turn.why.is_some() {
            warn!(region = name, "{turn}");
        } else {
            info!(region = name, "{turn}");
        }
    }
}

/// Asks for everything once, before anything is launched. Never fails: what is not answered has a stand-in. Nor does it wait for
/// long: a price list that does not answer is asked again when nodes come up already.
pub async fn hydrate(region: &Region, feeds: &Feeds, patience: impl Fn(Part) -> Duration) {
    let parts = feeds.parts();
    let asked = parts.iter().map(|part| {
        let patience = patience(*part);
        async move {
            if tokio::time::timeout(patience, refresh_part(region, feeds, *part)).await.is_err() {
                warn!("{part} were not answered in {} s: {}; asked again soon", patience.as_secs(), part.stand_in());
            }
        }
    });
    join_all(asked).await;
    let snapshot = region.snapshot();
    info!(
        region = snapshot.region,
        instance_types = snapshot.types.len(),
        on_demand_prices = snapshot.on_demand.len(),
        spot_prices = snapshot.spot.as_ref().map_or(0, |spot| spot.values().map(BTreeMap::len).sum()),
        "what the region offers is known"
    );
}

/// How long the start waits for a part. To launch what a zone does not offer is worse than to wait; to know prices that are a
/// little off is not.
pub fn patience(part: Part) -> Duration {
    match part {
        Part::Types | Part::Zones => Duration::from_mins(1),
        Part::OnDemandPrices | Part::SpotPrices => Duration::from_secs(10),
    }
}

/// Keeps a hydrated region fresh until the process ends.
pub async fn keep_fresh(region: Arc<Region>, feeds: Feeds) {
    let parts = feeds.parts();
    let mut age = Duration::ZERO;
    let mut failures = 0;
    loop {
        let failed = missing(&region, &parts);
        let wait = next_wait(age, failures, !failed.is_empty());
        tokio::time::sleep(wait).await;
        age += wait;
        if age >= PERIOD {
            age = Duration::ZERO;
            refresh(&region, &feeds, &parts).await;
        } else {
            refresh(&region, &feeds, &failed).await;
        }
        failures = if missing(&region, &parts).is_empty() { 0 } else { failures + 1 };
    }
}

/// Parts that the last refresh failed to read.
fn missing(region: &Region, parts: &BTreeSet<Part>) -> BTreeSet<Part> {
    let snapshot = region.snapshot();
    parts.iter().copied().filter(|part| !snapshot.source(*part).is_live()).collect()
}

/// How long to wait, `age` after everything was asked last.
fn next_wait(age: Duration, failures: u32, failed: bool) -> Duration {
    let left = PERIOD.saturating_sub(age);
    if failed { left.min(FIRST_RETRY.saturating_mul(1 << failures.min(10)).min(LONGEST_RETRY)) } else { left }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::ec2::aws::client::wire;
    use crate::cloud::ec2::offerings::region::{RegionSnapshot, Source};

    #[tokio::test]
    async fn a_price_list_that_does_not_answer_holds_nothing_up() {
        let (clients, _) = wire::clients(Box::new(|request| match request.action.as_str() {
            "DescribeInstanceTypeOfferings" => wire::ok(
                "DescribeInstanceTypeOfferings",
                "<instanceTypeOfferingSet><item><instanceType>m5.large</instanceType><location>us-east-1a</location></item></instanceTypeOfferingSet>",
            ),
            // What an endpoint says that knows no such action: the SDK tries that again and again.
            _ => Some((500, "<html>".into())),
        }));
        let region = Region::new(RegionSnapshot::stand_in("us-east-1", embedded(), 0));
        let feeds = Feeds { ec2: clients.ec2.clone(), pricing: Some(clients.pricing.clone()) };
        let begin = std::time::Instant::now();
        hydrate(&region, &feeds, |_| Duration::from_millis(300)).await;
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
        let snapshot = region.snapshot();
        assert!(snapshot.source(Part::Zones).is_live(), "what is answered is taken in");
        assert!(matches!(snapshot.source(Part::OnDemandPrices), Source::StandIn { .. }));
        assert!(missing(&region, &feeds.parts()).contains(&Part::OnDemandPrices), "and the rest is asked again");
    }

    #[test]
    fn what_failed_is_asked_again_ever_later_and_everything_every_twelve_hours() {
        let hours = Duration::from_hours;
        let minutes = Duration::from_mins;
        for (age, failures, failed, expected) in [
            (Duration::ZERO, 0, false, hours(12)),
            (hours(1), 0, false, hours(11)),
            (Duration::ZERO, 0, true, minutes(1)),
            (minutes(1), 1, true, minutes(2)),
            (minutes(3), 2, true, minutes(4)),
            (hours(2), 6, true, hours(1)),
            (hours(2), 4_000, true, hours(1)),
            (minutes(12 * 60 - 5), 9, true, minutes(5)),
        ] {
            assert_eq!(next_wait(age, failures, failed), expected, "{age:?} {failures} {failed}");
        }
    }
}
