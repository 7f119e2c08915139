//! The state file: a journal of JSON lines, so that instances outlive the process that launched them.
//!
//! An entry is written before the call that caused it answers. A line that a crash cut short at the end is dropped; anything
//! else that can't be read is an error, because guessing would lose instances.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::cloud::simulated::record::{Entry, Ledger};

/// Why a state file can't be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another process holds it.
    #[error("state file {} is in use by another process; give each its own or stop the other", .0.display())]
    InUse(PathBuf),
    /// Reading or writing failed.
    #[error("state file {}: {source}", .path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line that is not the last is no entry.
    #[error("line {line} of state file {} is no journal entry ({source}); move the file away to begin afresh", .path.display())]
    Corrupt {
        /// File.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Why.
        source: serde_json::Error,
    },
}

/// An open state file.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Length up to which the file holds whole entries.
    whole: u64,
    /// Entries not written yet because an earlier write failed.
    backlog: Vec<u8>,
    /// Held as long as the journal lives; the system frees it when the process dies.
    _lock: File,
}

impl Journal {
    /// Opens or makes a state file, replays and compacts it.
    ///
    /// # Errors
    /// Another process holds it, it can't be read or written, or a line in its midst is damaged.
    pub fn open(path: &Path) -> Result<(Self, Ledger), JournalError> {
        let failed = |source| JournalError::Io { path: path.to_owned(), source };
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).open(beside(path, "lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(JournalError::InUse(path.to_owned())),
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        let ledger =
            replay(&text).map_err(|(line, source)| JournalError::Corrupt { path: path.to_owned(), line, source })?;

        // Written aside and renamed: a crash leaves the old journal or the new one, never half of one.
        let compact = lines(&ledger.entries());
        let aside = beside(path, "new");
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).open(&aside).map_err(failed)?;
        file.write_all(&compact).and_then(|()| file.sync_all()).map_err(failed)?;
        fs::rename(&aside, path).map_err(failed)?;
        let whole = compact.len() as u64;
        Ok((Self { path: path.to_owned(), file, whole, backlog: Vec::new(), _lock: lock }, ledger))
    }

    /// Appends entries. After a failure they are kept and written with the next call.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn append(&mut self, entries: &[Entry]) -> Result<(), JournalError> {
        self.backlog.extend(lines(entries));
        if self.backlog.is_empty() {
            return Ok(());
        }
        self.write_backlog().map_err(|source| JournalError::Io { path: self.path.clone(), source })
    }

    fn write_backlog(&mut self) -> io::Result<()> {
        // A failed write may have left part of a line behind.
        self.file.set_len(self.whole)?;
        self.file.seek(SeekFrom::Start(self.whole))?;
        self.file.write_all(&self.backlog)?;
        self.whole += self.backlog.len() as u64;
        self.backlog.clear();
        Ok(())
    }
}

fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    PathBuf::from(name)
}

fn lines(entries: &[Entry]) -> Vec<u8> {
    let mut out = Vec::new();
    for entry in entries {
        // Entries hold only strings, numbers and maps with string keys, none of which JSON can refuse.
        out.extend(serde_json::to_vec(entry).expect("an entry is always JSON"));
        out.push(b'\n');
    }
    out
}

/// The ledger that a journal adds up to, or the damaged line and why.
fn replay(text: &[u8]) -> Result<Ledger, (usize, serde_json::Error)> {
    let mut ledger = Ledger::default();
    let mut pieces = text.split(|byte| *byte == b'\n').enumerate().peekable();
    while let Some((index, line)) = pieces.next() {
        if line.is_empty() {
            continue;
        }
        match serde_json::from_slice::<Entry>(line) {
            Ok(entry) => ledger.apply(&entry),
            // Every whole line ends in a line feed, so what follows the last one was cut short.
            Err(_) if pieces.peek().is_none() => break,
            Err(error) => return Err((index + 1, error)),
        }
    }
    Ok(ledger)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::MessageKind;
    use crate::cloud::simulated::record::{NodeStep, QueuedMessage};

    fn started() -> Entry {
        Entry::Started { at_ms: 5, launches: 0, messages: 0 }
    }

    fn sent(id: &str) -> Entry {
        Entry::Sent(QueuedMessage {
            id: id.into(),
            kind: MessageKind::SpotInterruption,
            instance_id: "i-1".into(),
            at_ms: 7,
        })
    }

    #[test]
    fn what_was_appended_is_there_after_reopening() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let (mut journal, ledger) = Journal::open(&path).unwrap();
        assert_eq!(ledger, Ledger::default());
        journal.append(&[started(), sent("a"), sent("b")]).unwrap();
        journal.append(&[Entry::Deleted { id: "a".into() }]).unwrap();
        drop(journal);
        let (mut journal, ledger) = Journal::open(&path).unwrap();
        assert_eq!((ledger.started_at_ms, ledger.messages), (Some(5), 2));
        assert_eq!(ledger.queue.keys().collect::<Vec<_>>(), ["b"]);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2, "compacted on opening");
        journal.append(&[sent("c")]).unwrap();
        drop(journal);
        let (_, ledger) = Journal::open(&path).unwrap();
        assert_eq!((ledger.messages, ledger.queue.len()), (3, 2));
    }

    #[test]
    fn a_line_cut_short_by_a_crash_is_dropped_wherever_it_was_cut() {
        let whole = lines(&[started(), sent("a")]);
        let last = lines(&[sent("b")]);
        for cut in 0..last.len() - 1 {
            let text = [whole.as_slice(), &last[..cut]].concat();
            let ledger = replay(&text).unwrap();
            assert_eq!(ledger.queue.contains_key("b"), cut == last.len() - 1, "{cut}");
            assert!(ledger.queue.contains_key("a"));
        }
        assert!(replay(&[whole, last].concat()).unwrap().queue.contains_key("b"));
    }

    #[test]
    fn a_damaged_line_in_the_midst_is_named_and_the_file_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let text = [lines(&[started()]), b"{\"entry\":\n".to_vec(), lines(&[sent("a")])].concat();
        fs::write(&path, &text).unwrap();
        let message = Journal::open(&path).unwrap_err().to_string();
        assert!(message.starts_with("line 2 of state file "), "{message}");
        assert!(message.ends_with("move the file away to begin afresh"), "{message}");
        assert_eq!(fs::read(&path).unwrap(), text);
    }

    #[test]
    fn only_one_process_uses_a_state_file_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let (first, _) = Journal::open(&path).unwrap();
        assert!(matches!(Journal::open(&path), Err(JournalError::InUse(_))));
        drop(first);
        assert!(Journal::open(&path).is_ok());
    }

    #[test]
    fn an_entry_about_something_unknown_changes_nothing() {
        let mut ledger = Ledger::default();
        ledger.apply(&started());
        let before = ledger.clone();
        for entry in [
            Entry::Shutdown { id: "i-x".into(), at_ms: 1, gone_at_ms: 2 },
            Entry::Panicked { id: "i-x".into() },
            Entry::Node { id: "i-x".into(), step: NodeStep::Removed },
            Entry::Deleted { id: "m".into() },
            Entry::Forgotten { id: "i-x".into() },
        ] {
            ledger.apply(&entry);
            assert_eq!(ledger, before, "{entry:?}");
        }
    }
}
