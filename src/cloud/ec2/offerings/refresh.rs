//! Refreshes the region's offerings: at start, then every twelve hours, and sooner after a failure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{OptionFuture, join_all};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use tracing::{info, warn};

use crate::catalog::embedded;
use crate::ec2::offerings::region::Region;
use crate::ec2::offerings::region_snapshot::{Dataset, RegionResponses, SourceTransition};
use crate::ec2::offerings::{instance_types, list_prices, spot_prices};

/// Interval of complete refreshes.
const PERIOD: Duration = Duration::from_hours(12);
/// Wait before failed APIs are called again; it doubles with each failure, up to [`LONGEST_RETRY`].
const FIRST_RETRY: Duration = Duration::from_mins(1);
const LONGEST_RETRY: Duration = Duration::from_hours(1);

/// The APIs that describe the region's offerings.
#[derive(Clone, Debug)]
pub struct RegionApis {
    pub ec2: aws_sdk_ec2::Client,
    /// Pricing, `None` where it is unreachable (see
    /// [`list_prices::has_pricing_api`]): the embedded price list is used.
    pub pricing: Option<aws_sdk_pricing::Client>,
}

impl RegionApis {
    /// The datasets that these APIs report.
    fn datasets(&self) -> BTreeSet<Dataset> {
        Dataset::ALL
            .into_iter()
            .filter(|dataset| *dataset != Dataset::OnDemandPrices || self.pricing.is_some())
            .collect()
    }

    /// Calls the APIs of some datasets concurrently.
    pub async fn fetch(&self, region: &str, datasets: &BTreeSet<Dataset>, now: UnixMillis) -> RegionResponses {
        let wanted = |dataset: Dataset| datasets.contains(&dataset).then_some(());
        let pricing = self.pricing.as_ref().filter(|_| datasets.contains(&Dataset::OnDemandPrices));
        let (types, zones, on_demand, spot) = futures::join!(
            OptionFuture::from(wanted(Dataset::Types).map(|()| instance_types::describe_instance_types(&self.ec2))),
            OptionFuture::from(wanted(Dataset::Zones).map(|()| instance_types::describe_offerings(&self.ec2))),
            OptionFuture::from(pricing.map(|pricing| list_prices::get_products(pricing, region))),
            OptionFuture::from(wanted(Dataset::SpotPrices).map(|()| spot_prices::describe_spot_prices(&self.ec2, now))),
        );
        let types = types.map(|response| {
            response.map(|infos| {
                let (usable, unusable) = instance_types::raw_instance_types(&infos, embedded());
                if let Some(first) = unusable.first() {
                    warn!(count = unusable.len(), %first, "left out instance types with unusable descriptions");
                }
                usable
            })
        });
        let zones = zones.map(|response| response.map(|offerings| instance_types::zones_by_type(&offerings)));
        RegionResponses { types, zones, on_demand, spot }
    }
}

/// Refreshes some datasets and applies each response as it arrives. Logs every API that starts or stops failing.
pub async fn refresh(region: &Region, apis: &RegionApis, datasets: &BTreeSet<Dataset>) {
    join_all(datasets.iter().map(|dataset| refresh_dataset(region, apis, *dataset))).await;
}

async fn refresh_dataset(region: &Region, apis: &RegionApis, dataset: Dataset) {
    let name = region.snapshot().region.clone();
    let responses = apis.fetch(&name, &BTreeSet::from([dataset]), clock::now()).await;
    for SourceTransition { dataset, error } in region.apply(responses) {
        if let Some(error) = error {
            warn!(region = name, %dataset, error, fallback = dataset.fallback(), "could not read region data");
        } else {
            info!(region = name, %dataset, "region data is read from AWS again");
        }
    }
    if region.snapshot().source(dataset).is_live() {
        region.record_read(dataset, clock::now());
    }
}

/// Reads every dataset once, before the first launch. Never fails: every dataset has a fallback. Waits at most `timeout` for each:
/// a slow price list is read again later, while nodes are launched.
pub async fn hydrate(region: &Region, apis: &RegionApis, timeout: impl Fn(Dataset) -> Duration) {
    let datasets = apis.datasets();
    let reads = datasets.iter().map(|dataset| {
        let timeout = timeout(*dataset);
        async move {
            if tokio::time::timeout(timeout, refresh_dataset(region, apis, *dataset)).await.is_err() {
                warn!(%dataset, ?timeout, fallback = dataset.fallback(), "no response with region data, retrying soon");
            }
        }
    });
    join_all(reads).await;
    let snapshot = region.snapshot();
    info!(
        region = snapshot.region,
        instance_types = snapshot.types.len(),
        on_demand_prices = snapshot.on_demand.len(),
        spot_prices = snapshot.spot.as_ref().map_or(0, |spot| spot.values().map(BTreeMap::len).sum()),
        "read region data"
    );
}

/// How long the start waits for a dataset. Waiting is better than launching a type that a zone does not offer, but not better than
/// slightly wrong prices.
pub fn start_timeout(dataset: Dataset) -> Duration {
    match dataset {
        Dataset::Types | Dataset::Zones => Duration::from_mins(1),
        Dataset::OnDemandPrices | Dataset::SpotPrices => Duration::from_secs(10),
    }
}

/// Refreshes a hydrated region until the process ends.
pub async fn run(region: Arc<Region>, apis: RegionApis) {
    let datasets = apis.datasets();
    let mut age = Duration::ZERO;
    let mut failures = 0;
    loop {
        let failed = failed_datasets(&region, &datasets);
        let wait = next_wait(age, failures, !failed.is_empty());
        tokio::time::sleep(wait).await;
        age += wait;
        if age >= PERIOD {
            age = Duration::ZERO;
            refresh(&region, &apis, &datasets).await;
        } else {
            refresh(&region, &apis, &failed).await;
        }
        failures = if failed_datasets(&region, &datasets).is_empty() { 0 } else { failures + 1 };
    }
}

/// Datasets whose last refresh failed.
fn failed_datasets(region: &Region, datasets: &BTreeSet<Dataset>) -> BTreeSet<Dataset> {
    let snapshot = region.snapshot();
    datasets.iter().copied().filter(|dataset| !snapshot.source(*dataset).is_live()).collect()
}

/// Wait before the next refresh, `age` after the last complete one.
fn next_wait(age: Duration, failures: u32, failed: bool) -> Duration {
    let left = PERIOD.saturating_sub(age);
    if failed { left.min(FIRST_RETRY.saturating_mul(1 << failures.min(10)).min(LONGEST_RETRY)) } else { left }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ec2::offerings::region_snapshot::{RegionSnapshot, Source};
    use crate::test_support::fake_aws;

    #[tokio::test]
    async fn a_price_list_without_a_response_does_not_delay_the_start() {
        let (clients, _) = fake_aws::clients(Box::new(|request| match request.action.as_str() {
            "DescribeInstanceTypeOfferings" => fake_aws::ok(
                "DescribeInstanceTypeOfferings",
                "<instanceTypeOfferingSet><item><instanceType>m5.large</instanceType><location>us-east-1a</location></item></instanceTypeOfferingSet>",
            ),
            // The response of an endpoint without this action: the SDK retries.
            _ => Some((500, "<html>".into())),
        }));
        let region = Region::new(RegionSnapshot::embedded("us-east-1", embedded()));
        let apis = RegionApis { ec2: clients.ec2.clone(), pricing: Some(clients.pricing.clone()) };
        let start = std::time::Instant::now();
        hydrate(&region, &apis, |_| Duration::from_millis(300)).await;
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        let snapshot = region.snapshot();
        assert!(snapshot.source(Dataset::Zones).is_live(), "the response is applied");
        assert!(matches!(snapshot.source(Dataset::OnDemandPrices), Source::Embedded { .. }));
        assert!(region.read_at(Dataset::Zones).is_some() && region.read_at(Dataset::OnDemandPrices).is_none());
        assert!(
            failed_datasets(&region, &apis.datasets()).contains(&Dataset::OnDemandPrices),
            "the price list is read again"
        );
    }

    #[test]
    fn failures_are_retried_with_backoff_and_everything_every_twelve_hours() {
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
