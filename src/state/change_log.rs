//! Names of changed objects by revision, so that a cache can ask for the changes since it was last updated.

use std::collections::{BTreeMap, HashMap};

/// The log. Every name is listed once, at its last change; the oldest entries are dropped beyond a limit.
#[derive(Debug, Default)]
pub struct ChangeLog {
    /// Revision of the last change; 0 before the first.
    revision: u64,
    names: BTreeMap<u64, String>,
    last: HashMap<String, u64>,
    /// Changes up to this revision may have been dropped.
    compacted: u64,
}

impl ChangeLog {
    /// Maximum number of names; far more than nodes exist at a time.
    const CAPACITY: usize = 100_000;

    /// Records a change of `name`.
    pub fn record(&mut self, name: &str) {
        self.revision += 1;
        if let Some(last) = self.last.get_mut(name) {
            let name = self.names.remove(last);
            *last = self.revision;
            self.names.extend(name.map(|name| (self.revision, name)));
            return;
        }
        self.last.insert(name.to_owned(), self.revision);
        self.names.insert(self.revision, name.to_owned());
        if self.names.len() > Self::CAPACITY
            && let Some((revision, oldest)) = self.names.pop_first()
        {
            self.last.remove(&oldest);
            self.compacted = revision;
        }
    }

    /// Number of names.
    pub fn size(&self) -> usize {
        self.names.len()
    }

    /// Revision of the last change.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Names that changed after `revision`; `None` when some of them have been dropped.
    pub fn since(&self, revision: u64) -> Option<impl Iterator<Item = &str>> {
        let names = self.names.range(revision.saturating_add(1)..).map(|(_, name)| name.as_str());
        (revision >= self.compacted).then_some(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reader_gets_the_names_that_changed_since_its_revision() {
        let mut log = ChangeLog::default();
        let since = |log: &ChangeLog, revision| log.since(revision).unwrap().map(str::to_owned).collect::<Vec<_>>();
        assert!(since(&log, 0).is_empty());
        log.record("a");
        log.record("b");
        let read = log.revision();
        assert_eq!(since(&log, 0), ["a", "b"]);
        log.record("a");
        assert_eq!(since(&log, read), ["a"]);
        assert_eq!(since(&log, 0), ["b", "a"], "each name once");
        assert!(since(&log, log.revision()).is_empty());
    }

    #[test]
    fn a_reader_older_than_the_oldest_entry_gets_none() {
        let mut log = ChangeLog::default();
        for number in 0..=ChangeLog::CAPACITY {
            log.record(&number.to_string());
        }
        assert!(log.since(0).is_none());
        assert_eq!(log.since(1).unwrap().count(), ChangeLog::CAPACITY);
    }
}
