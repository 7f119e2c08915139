//! The state file: a journal of JSON lines that keeps instances across restarts.
//!
//! An entry is written before the call that caused it returns. An incomplete last line, left by a crash, is dropped; any other
//! unreadable line is an error, because skipping it would lose instances.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::simulated::engine_state::{EngineState, JournalEntry};

/// Why a state file can't be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another process holds its lock.
    #[error("state file {} is in use by another process; give each its own or stop the other", .0.display())]
    InUse(PathBuf),
    /// Reading or writing failed.
    #[error("state file {}: {source}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A line other than the last one is not an entry.
    #[error("line {line} of state file {} is no journal entry ({source}); move the file away to begin afresh", .path.display())]
    Corrupt {
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        source: serde_json::Error,
    },
}

/// An open state file.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Length of the complete entries in the file.
    complete_len: u64,
    /// Entries not written yet because an earlier write failed.
    backlog: Vec<u8>,
    /// Held until the journal is dropped; the operating system releases it when the process ends.
    _lock: File,
}

impl Journal {
    /// Opens or creates a state file, replays and compacts it.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn open(path: &Path) -> Result<(Self, EngineState), JournalError> {
        let failed = |source| JournalError::Io { path: path.to_owned(), source };
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).open(sibling(path, "lock")).map_err(failed)?;
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
        let state =
            replay(&text).map_err(|(line, source)| JournalError::Corrupt { path: path.to_owned(), line, source })?;

        // Written to a temporary file and renamed: a crash leaves either the old or the new journal, complete.
        let compact = lines(&state.entries());
        let temporary = sibling(path, "new");
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).open(&temporary).map_err(failed)?;
        file.write_all(&compact).and_then(|()| file.sync_all()).map_err(failed)?;
        fs::rename(&temporary, path).map_err(failed)?;
        let complete_len = compact.len() as u64;
        Ok((Self { path: path.to_owned(), file, complete_len, backlog: Vec::new(), _lock: lock }, state))
    }

    /// Appends entries. After a failure they are written with the next call.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn append(&mut self, entries: &[JournalEntry]) -> Result<(), JournalError> {
        self.backlog.extend(lines(entries));
        if self.backlog.is_empty() {
            return Ok(());
        }
        self.write_backlog().map_err(|source| JournalError::Io { path: self.path.clone(), source })
    }

    fn write_backlog(&mut self) -> io::Result<()> {
        // A failed write may have left an incomplete line.
        self.file.set_len(self.complete_len)?;
        self.file.seek(SeekFrom::Start(self.complete_len))?;
        self.file.write_all(&self.backlog)?;
        self.complete_len += self.backlog.len() as u64;
        self.backlog.clear();
        Ok(())
    }
}

fn sibling(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    PathBuf::from(name)
}

fn lines(entries: &[JournalEntry]) -> Vec<u8> {
    let mut out = Vec::new();
    for entry in entries {
        // Entries contain only strings, numbers and maps with string keys, which always serialize.
        out.extend(serde_json::to_vec(entry).expect("an entry always serializes to JSON"));
        out.push(b'\n');
    }
    out
}

/// The state that a journal restores, or the number of an unreadable line and the error.
fn replay(text: &[u8]) -> Result<EngineState, (usize, serde_json::Error)> {
    let mut state = EngineState::default();
    let mut pieces = text.split(|byte| *byte == b'\n').enumerate().peekable();
    while let Some((index, line)) = pieces.next() {
        if line.is_empty() {
            continue;
        }
        match serde_json::from_slice::<JournalEntry>(line) {
            Ok(entry) => state.apply(&entry),
            // Every complete line ends with a line feed: text after the last one is incomplete.
            Err(_) if pieces.peek().is_none() => break,
            Err(error) => return Err((index + 1, error)),
        }
    }
    Ok(state)
}

#[cfg(test)]
mod tests {
    use stowage_model::time::UnixMillis;

    use super::*;
    use crate::MessageKind;
    use crate::simulated::engine_state::{NodeStep, QueuedMessage};

    fn started() -> JournalEntry {
        JournalEntry::Started { at: UnixMillis(5), launches: 0, messages: 0 }
    }

    fn sent(id: &str) -> JournalEntry {
        JournalEntry::Sent(QueuedMessage {
            id: id.into(),
            kind: MessageKind::SpotInterruption,
            instance_id: "i-1".into(),
            sent_at: UnixMillis(7),
        })
    }

    #[test]
    fn appended_entries_are_restored_on_opening() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let (mut journal, state) = Journal::open(&path).unwrap();
        assert_eq!(state, EngineState::default());
        journal.append(&[started(), sent("a"), sent("b")]).unwrap();
        journal.append(&[JournalEntry::Deleted { id: "a".into() }]).unwrap();
        drop(journal);
        let (mut journal, state) = Journal::open(&path).unwrap();
        assert_eq!((state.started_at, state.messages), (Some(UnixMillis(5)), 2));
        assert_eq!(state.queue.keys().collect::<Vec<_>>(), ["b"]);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2, "compacted on opening");
        journal.append(&[sent("c")]).unwrap();
        drop(journal);
        let (_, state) = Journal::open(&path).unwrap();
        assert_eq!((state.messages, state.queue.len()), (3, 2));
    }

    #[test]
    fn the_format_of_entries_never_changes() {
        let shutdown = JournalEntry::Shutdown { id: "i-1".into(), at: UnixMillis(1), terminated_at: UnixMillis(2) };
        let text = String::from_utf8(lines(&[started(), sent("a"), shutdown])).unwrap();
        insta::assert_snapshot!(text, @r#"
        {"entry":"started","at_ms":5,"launches":0,"messages":0}
        {"entry":"sent","id":"a","kind":"spot-interruption","instance_id":"i-1","at_ms":7}
        {"entry":"shutdown","id":"i-1","at_ms":1,"gone_at_ms":2}
        "#);
    }

    #[test]
    fn an_incomplete_last_line_is_dropped() {
        let whole = lines(&[started(), sent("a")]);
        let last = lines(&[sent("b")]);
        for cut in 0..last.len() - 1 {
            let text = [whole.as_slice(), &last[..cut]].concat();
            let state = replay(&text).unwrap();
            assert_eq!(state.queue.contains_key("b"), cut == last.len() - 1, "{cut}");
            assert!(state.queue.contains_key("a"));
        }
        assert!(replay(&[whole, last].concat()).unwrap().queue.contains_key("b"));
    }

    #[test]
    fn an_unreadable_line_is_reported_and_the_file_is_not_changed() {
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
    fn an_entry_about_an_unknown_id_changes_nothing() {
        let mut state = EngineState::default();
        state.apply(&started());
        let before = state.clone();
        for entry in [
            JournalEntry::Shutdown { id: "i-x".into(), at: UnixMillis(1), terminated_at: UnixMillis(2) },
            JournalEntry::Panicked { id: "i-x".into() },
            JournalEntry::Node { id: "i-x".into(), step: NodeStep::Removed },
            JournalEntry::Deleted { id: "m".into() },
            JournalEntry::Forgotten { id: "i-x".into() },
        ] {
            state.apply(&entry);
            assert_eq!(state, before, "{entry:?}");
        }
    }
}
