//! Emits an event on every EC2NodeClass when an optional AWS API becomes unavailable or recovers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use stowage_cloud::OptionalApi;
use stowage_model::events::DeclaredEvent;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::Context;

/// How often the cloud is queried.
const PERIOD: Duration = Duration::from_secs(5);

/// Failing APIs, with the effect and the cause.
type DegradedApis = BTreeMap<OptionalApi, String>;

/// Events and notes for the APIs that failed or recovered. A change of the cause is not a transition.
fn transitions(before: &DegradedApis, now: &DegradedApis) -> Vec<(&'static DeclaredEvent, String)> {
    let new = now.iter().filter(|(api, _)| !before.contains_key(*api));
    let over = before.keys().filter(|api| !now.contains_key(*api));
    let failed = new.map(|(api, note)| (api.failed(), note.clone()));
    let recovered = over.map(|api| (api.recovered(), api.recovery_note().to_owned()));
    failed.chain(recovered).collect()
}

/// Runs until the process ends. Does nothing when the cloud does not report the status of its services.
pub async fn run(ctx: Arc<Context>) {
    let Some(services) = ctx.cloud.capabilities().service_status else { return heartbeat::rest_forever().await };
    let mut failing = DegradedApis::new();
    loop {
        // Without a class, no event could be emitted: the transition is reported with the first class.
        let has_class = !ctx.cluster.read().classes.is_empty();
        let now = if has_class { services.failing_apis() } else { DegradedApis::new() };
        for (event, note) in transitions(&failing, &now) {
            ctx.emit_for_classes(event.note(&note)).await;
        }
        failing = now;
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use stowage_model::events;

    use super::*;

    fn apis(pairs: &[(OptionalApi, &str)]) -> DegradedApis {
        pairs.iter().map(|(api, note)| (*api, (*note).to_owned())).collect()
    }

    #[test]
    fn each_transition_emits_one_event() {
        let none = apis(&[]);
        let prices = apis(&[(OptionalApi::SpotPrices, "refused")]);
        let tags = apis(&[(OptionalApi::InstanceTags, "refused")]);
        let unreadable = (events::SPOT_PRICES_UNREADABLE, "refused".to_owned());
        let readable = (events::SPOT_PRICES_READABLE, "it can be read again".to_owned());
        let unwritable = (events::INSTANCE_TAGS_UNWRITABLE, "refused".to_owned());
        let writable = (events::INSTANCE_TAGS_WRITABLE, "it can be written again".to_owned());
        assert_eq!(transitions(&none, &prices), [unreadable]);
        assert_eq!(transitions(&prices, &apis(&[(OptionalApi::SpotPrices, "throttled")])), []);
        assert_eq!(transitions(&prices, &tags), [unwritable, readable.clone()]);
        assert_eq!(transitions(&prices, &none), [readable]);
        assert_eq!(transitions(&tags, &none), [writable]);
    }
}
