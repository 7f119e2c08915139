//! People are told, in an event on the node classes, when something optional can't be read from the cloud any more, and when it can
//! be again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::context::Context;

/// How often the cloud is looked at.
const PERIOD: Duration = Duration::from_secs(5);

/// An event: whether it is a warning, its reason, and its note.
type Told = (bool, String, String);

/// What is to be told of a change. That something fails in another way is no news.
fn news(before: &BTreeMap<&'static str, String>, now: &BTreeMap<&'static str, String>) -> Vec<Told> {
    let begun = now.iter().filter(|(what, _)| !before.contains_key(*what));
    let over = before.keys().filter(|what| !now.contains_key(*what));
    let begun = begun.map(|(what, note)| (true, format!("{what}Unreadable"), note.clone()));
    begun.chain(over.map(|what| (false, format!("{what}Readable"), "it can be read again".to_owned()))).collect()
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut before = BTreeMap::new();
    loop {
        // Where there is no class yet, there is nobody to tell.
        let heard = !ctx.cluster.read().classes.is_empty();
        let now = if heard { ctx.cloud.unreadable() } else { BTreeMap::new() };
        for (warning, reason, note) in news(&before, &now) {
            ctx.tell_classes(warning, &reason, &note).await;
        }
        before = now;
        tokio::time::sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_is_told_once() {
        let map = |pairs: &[(&'static str, &str)]| -> BTreeMap<&'static str, String> {
            pairs.iter().map(|(what, note)| (*what, (*note).to_owned())).collect()
        };
        let (none, one) = (map(&[]), map(&[("Prices", "refused")]));
        assert_eq!(news(&none, &one), [(true, "PricesUnreadable".to_owned(), "refused".to_owned())]);
        assert_eq!(news(&one, &map(&[("Prices", "throttled")])), []);
        let other = map(&[("Zones", "refused")]);
        let reasons: Vec<String> = news(&one, &other).into_iter().map(|(_, reason, _)| reason).collect();
        assert_eq!(reasons, ["ZonesUnreadable", "PricesReadable"]);
        assert_eq!(news(&one, &none), [(false, "PricesReadable".to_owned(), "it can be read again".to_owned())]);
    }
}
