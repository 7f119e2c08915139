//! Emits an event on every EC2NodeClass when an optional AWS API becomes unavailable or recovers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::controllers::context::{Context, EventSpec};

/// How often the cloud is queried.
const PERIOD: Duration = Duration::from_secs(5);

/// Unavailable APIs by name, with the effect and the cause.
type DegradedApis = BTreeMap<&'static str, String>;

/// How transitions of an API appear in events.
struct ApiTransition {
    /// Suffix of the reason when the API becomes unavailable.
    unavailable: &'static str,
    /// Suffix of the reason when the API recovers.
    recovered: &'static str,
    /// Note when the API recovers.
    note: &'static str,
}

const READ: ApiTransition =
    ApiTransition { unavailable: "Unreadable", recovered: "Readable", note: "it can be read again" };
const WRITE: ApiTransition =
    ApiTransition { unavailable: "Unwritable", recovered: "Writable", note: "it can be written again" };

/// An event to emit.
#[derive(Debug, PartialEq, Eq)]
struct TransitionEvent {
    warning: bool,
    reason: String,
    note: String,
}

impl ApiTransition {
    /// Events for the APIs that became unavailable or recovered. A change of the cause is no transition.
    fn events(&self, before: &DegradedApis, now: &DegradedApis) -> Vec<TransitionEvent> {
        let new = now.iter().filter(|(api, _)| !before.contains_key(*api));
        let over = before.keys().filter(|api| !now.contains_key(*api));
        let new = new.map(|(api, note)| TransitionEvent {
            warning: true,
            reason: format!("{api}{}", self.unavailable),
            note: note.clone(),
        });
        let over = over.map(|api| TransitionEvent {
            warning: false,
            reason: format!("{api}{}", self.recovered),
            note: self.note.to_owned(),
        });
        new.chain(over).collect()
    }
}

/// Runs until the process ends. Does nothing when the cloud does not report the status of its services.
pub async fn run(ctx: Arc<Context>) {
    let Some(services) = ctx.cloud.capabilities().service_status else { return std::future::pending().await };
    let (mut unreadable, mut unwritable) = (DegradedApis::new(), DegradedApis::new());
    loop {
        // Without a class, no event could be emitted: the transition is reported with the first class.
        let has_class = !ctx.cluster.read().classes.is_empty();
        let now = if has_class { (services.unreadable(), services.unwritable()) } else { Default::default() };
        let mut events = READ.events(&unreadable, &now.0);
        events.extend(WRITE.events(&unwritable, &now.1));
        for TransitionEvent { warning, reason, note } in &events {
            ctx.emit_for_classes(EventSpec { warning: *warning, reason, note }).await;
        }
        (unreadable, unwritable) = now;
        tokio::time::sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;

    fn apis(pairs: &[(&'static str, &str)]) -> DegradedApis {
        pairs.iter().map(|(api, note)| (*api, (*note).to_owned())).collect()
    }

    fn events(transition: &ApiTransition, before: &DegradedApis, now: &DegradedApis) -> Vec<(bool, String, String)> {
        transition.events(before, now).into_iter().map(|event| (event.warning, event.reason, event.note)).collect()
    }

    #[test]
    fn each_transition_emits_one_event() {
        let (none, prices, zones) = (apis(&[]), apis(&[("Prices", "refused")]), apis(&[("Zones", "refused")]));
        let unreadable = |api: &str| (true, format!("{api}Unreadable"), "refused".to_owned());
        let readable = (false, "PricesReadable".to_owned(), "it can be read again".to_owned());
        assert_eq!(events(&READ, &none, &prices), [unreadable("Prices")]);
        assert_eq!(events(&READ, &prices, &apis(&[("Prices", "throttled")])), []);
        assert_eq!(events(&READ, &prices, &zones), [unreadable("Zones"), readable.clone()]);
        assert_eq!(events(&READ, &prices, &none), [readable]);
    }

    #[test]
    fn writes_have_reasons_of_their_own() {
        let (none, tags) = (apis(&[]), apis(&[("InstanceTags", "refused")]));
        assert_eq!(events(&WRITE, &none, &tags)[0].1, "InstanceTagsUnwritable");
        assert_eq!(events(&WRITE, &tags, &none)[0].1, "InstanceTagsWritable");
    }
}
