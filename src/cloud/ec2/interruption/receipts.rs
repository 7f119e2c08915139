//! Receipts of messages that name several instances: such a message is deleted once the last of them is handled.

use std::collections::{BTreeMap, BTreeSet};

/// Between SQS's receipt handle and the number of the instance. Handles are base64, which has no such character.
const SEPARATOR: char = '#';
/// Age in milliseconds at which receipts of a message are dropped: its handle has long been replaced.
const WORTHLESS_MS: i64 = 600_000;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Open {
    unhandled: BTreeSet<usize>,
    since_ms: i64,
}

/// Messages with several instances that are not all handled yet, by handle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Receipts {
    open: BTreeMap<String, Open>,
}

impl Receipts {
    /// Receipts for the instances of a message, in order. That of a single instance is the handle itself.
    pub fn issue(&mut self, handle: &str, instances: usize, now_ms: i64) -> Vec<String> {
        self.open.retain(|_, open| now_ms.saturating_sub(open.since_ms) < WORTHLESS_MS);
        if instances < 2 {
            return vec![handle.to_owned(); instances];
        }
        self.open.insert(handle.to_owned(), Open { unhandled: (0..instances).collect(), since_ms: now_ms });
        (0..instances).map(|index| format!("{handle}{SEPARATOR}{index}")).collect()
    }

    /// Redeems the receipt of a handled instance: returns the handle of the message to delete if all its instances are handled. A
    /// receipt that is redeemed twice, or is too old, has no effect: a message that still exists is received again.
    pub fn hand_in(&mut self, receipt: &str) -> Option<String> {
        let Some((handle, index)) = receipt.rsplit_once(SEPARATOR) else {
            return Some(receipt.to_owned());
        };
        let open = self.open.get_mut(handle)?;
        if let Ok(index) = index.parse() {
            open.unhandled.remove(&index);
        }
        open.unhandled.is_empty().then(|| handle.to_owned())
    }

    /// Records that a message is deleted.
    pub fn deleted(&mut self, handle: &str) {
        self.open.remove(handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_one_instance_is_deleted_by_its_handle() {
        let mut receipts = Receipts::default();
        assert_eq!(receipts.issue("h", 1, 0), ["h"]);
        assert_eq!(receipts.hand_in("h"), Some("h".into()));
        assert_eq!(receipts, Receipts::default());
    }

    #[test]
    fn a_message_of_several_is_deleted_once_the_last_is_handled() {
        let mut receipts = Receipts::default();
        assert_eq!(receipts.issue("h", 3, 0), ["h#0", "h#1", "h#2"]);
        assert_eq!(receipts.hand_in("h#1"), None);
        assert_eq!(receipts.hand_in("h#1"), None);
        assert_eq!(receipts.hand_in("h#nonsense"), None);
        assert_eq!(receipts.hand_in("h#0"), None);
        assert_eq!(receipts.hand_in("h#2"), Some("h".into()));
        assert_eq!(receipts.hand_in("h#2"), Some("h".into()), "a failed delete may be tried again");
        receipts.deleted("h");
        assert_eq!(receipts.hand_in("h#2"), None);
    }

    #[test]
    fn receipts_of_messages_that_nobody_finished_are_dropped() {
        let mut receipts = Receipts::default();
        receipts.issue("old", 2, 0);
        receipts.issue("new", 2, WORTHLESS_MS);
        assert_eq!(receipts.hand_in("old#0"), None);
        assert_eq!(receipts.open.keys().collect::<Vec<_>>(), ["new"]);
    }
}
