//! Receipts of messages that name several instances: such a message is deleted once the last of them is handled.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use stowage_model::time::UnixMillis;

/// Between SQS's receipt handle and the number of the instance. Handles are base64, which has no such character.
const SEPARATOR: char = '#';
/// Age at which receipts of a message are dropped: a later receipt has long replaced its handle.
const RETENTION: Duration = Duration::from_mins(10);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Open {
    unhandled: BTreeSet<usize>,
    issued_at: UnixMillis,
}

/// Messages with several instances that are not all handled yet, by handle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Receipts {
    open: BTreeMap<String, Open>,
}

impl Receipts {
    /// Receipts for the instances of a message, in order. That of a single instance is the handle itself.
    pub fn issue(&mut self, handle: &str, instances: usize, now: UnixMillis) -> Vec<String> {
        self.open.retain(|_, open| now.saturating_since(open.issued_at) < RETENTION);
        if instances < 2 {
            return vec![handle.to_owned(); instances];
        }
        self.open.insert(handle.to_owned(), Open { unhandled: (0..instances).collect(), issued_at: now });
        (0..instances).map(|index| format!("{handle}{SEPARATOR}{index}")).collect()
    }

    /// Redeems the receipt of a handled instance: returns the handle of the message to delete if all its instances are handled. A
    /// receipt that is redeemed twice, or is too old, has no effect: a message that still exists is received again.
    pub fn redeem(&mut self, receipt: &str) -> Option<String> {
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
    fn the_receipt_of_a_single_instance_is_the_handle() {
        let mut receipts = Receipts::default();
        assert_eq!(receipts.issue("h", 1, UnixMillis(0)), ["h"]);
        assert_eq!(receipts.redeem("h"), Some("h".into()));
        assert_eq!(receipts, Receipts::default());
    }

    #[test]
    fn a_message_of_several_instances_is_deleted_after_the_last_is_handled() {
        let mut receipts = Receipts::default();
        assert_eq!(receipts.issue("h", 3, UnixMillis(0)), ["h#0", "h#1", "h#2"]);
        assert_eq!(receipts.redeem("h#1"), None);
        assert_eq!(receipts.redeem("h#1"), None);
        assert_eq!(receipts.redeem("h#nonsense"), None);
        assert_eq!(receipts.redeem("h#0"), None);
        assert_eq!(receipts.redeem("h#2"), Some("h".into()));
        assert_eq!(receipts.redeem("h#2"), Some("h".into()), "a failed delete can be repeated");
        receipts.deleted("h");
        assert_eq!(receipts.redeem("h#2"), None);
    }

    #[test]
    fn receipts_of_unfinished_messages_expire() {
        let mut receipts = Receipts::default();
        receipts.issue("old", 2, UnixMillis(0));
        receipts.issue("new", 2, UnixMillis(0) + RETENTION);
        assert_eq!(receipts.redeem("old#0"), None);
        assert_eq!(receipts.open.keys().collect::<Vec<_>>(), ["new"]);
    }
}
