//! People are told, in an event on the node classes, when something optional can't be read from the cloud or written there any more,
//! and when it can be again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::controllers::context::Context;

/// How often the cloud is looked at.
const PERIOD: Duration = Duration::from_secs(5);

/// An event: whether it is a warning, its reason, and its note.
type Told = (bool, String, String);

/// What can't be done, by a word for each: what that means and why.
type Troubles = BTreeMap<&'static str, String>;

/// What one does with something optional, as events say it.
struct Deed {
    /// How the reason ends when it begins to fail.
    fails: &'static str,
    /// How the reason ends when it works again.
    works: &'static str,
    /// The note when it works again.
    note: &'static str,
}

const READING: Deed = Deed { fails: "Unreadable", works: "Readable", note: "it can be read again" };
const WRITING: Deed = Deed { fails: "Unwritable", works: "Writable", note: "it can be written again" };

/// What is to be told of a change. That something fails in another way is no news.
fn news(deed: &Deed, before: &Troubles, now: &Troubles) -> Vec<Told> {
    let begun = now.iter().filter(|(what, _)| !before.contains_key(*what));
    let over = before.keys().filter(|what| !now.contains_key(*what));
    let begun = begun.map(|(what, note)| (true, format!("{what}{}", deed.fails), note.clone()));
    begun.chain(over.map(|what| (false, format!("{what}{}", deed.works), deed.note.to_owned()))).collect()
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let Some(services) = ctx.cloud.capabilities().service_status else { return std::future::pending().await };
    let (mut unreadable, mut unwritable) = (Troubles::new(), Troubles::new());
    loop {
        // Where there is no class yet, there is nobody to tell.
        let heard = !ctx.cluster.read().classes.is_empty();
        let now = if heard { (services.unreadable(), services.unwritable()) } else { Default::default() };
        let all = [news(&READING, &unreadable, &now.0), news(&WRITING, &unwritable, &now.1)].concat();
        for (warning, reason, note) in all {
            ctx.tell_classes(warning, &reason, &note).await;
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

    #[test]
    fn each_change_is_told_once() {
        let map = |pairs: &[(&'static str, &str)]| -> Troubles {
            pairs.iter().map(|(what, note)| (*what, (*note).to_owned())).collect()
        };
        let news = |before: &Troubles, now: &Troubles| news(&READING, before, now);
        let (none, one) = (map(&[]), map(&[("Prices", "refused")]));
        assert_eq!(news(&none, &one), [(true, "PricesUnreadable".to_owned(), "refused".to_owned())]);
        assert_eq!(news(&one, &map(&[("Prices", "throttled")])), []);
        let other = map(&[("Zones", "refused")]);
        let reasons: Vec<String> = news(&one, &other).into_iter().map(|(_, reason, _)| reason).collect();
        assert_eq!(reasons, ["ZonesUnreadable", "PricesReadable"]);
        assert_eq!(news(&one, &none), [(false, "PricesReadable".to_owned(), "it can be read again".to_owned())]);
    }

    #[test]
    fn what_can_not_be_written_has_words_of_its_own() {
        let one: Troubles = [("InstanceTags", "refused".to_owned())].into();
        let reasons = |before: &Troubles, now: &Troubles| {
            news(&WRITING, before, now).into_iter().map(|(warning, reason, _)| (warning, reason)).collect::<Vec<_>>()
        };
        assert_eq!(reasons(&Troubles::new(), &one), [(true, "InstanceTagsUnwritable".to_owned())]);
        assert_eq!(reasons(&one, &Troubles::new()), [(false, "InstanceTagsWritable".to_owned())]);
    }
}
