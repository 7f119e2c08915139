//! A table of shared values that forgets the values that nothing uses any more.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// Values that nobody else uses are looked for when the table weighs twice as much as after the last sweep, and at least this many bytes.
const MIN_SWEPT_BYTES: usize = 1 << 20;
/// Bytes of an entry besides its value: the reference, the weight, and the counters of the shared value.
const ENTRY_BYTES: usize = 48;

/// The table. It weighs at most twice what is in use, plus a constant; the cost of a sweep is amortized over the insertions before it.
#[derive(Debug)]
pub struct InternTable<T: ?Sized> {
    /// Values with their weights in bytes.
    entries: HashMap<Arc<T>, usize>,
    bytes: usize,
    /// Weight after the last sweep.
    swept: usize,
}

impl<T: ?Sized> Default for InternTable<T> {
    fn default() -> Self {
        Self { entries: HashMap::new(), bytes: 0, swept: 0 }
    }
}

impl<T: ?Sized + Eq + Hash> InternTable<T> {
    /// The shared value that equals `value`.
    pub fn get<Q: ?Sized + Eq + Hash>(&self, value: &Q) -> Option<Arc<T>>
    where
        Arc<T>: Borrow<Q>,
    {
        self.entries.get_key_value(value).map(|(shared, _)| Arc::clone(shared))
    }

    /// Adds a value that the table does not have, of about this many bytes.
    pub fn insert(&mut self, value: impl Into<Arc<T>>, bytes: usize) -> Arc<T> {
        let (value, bytes) = (value.into(), bytes + ENTRY_BYTES);
        if self.bytes + bytes > 2 * self.swept.max(MIN_SWEPT_BYTES) {
            self.sweep();
        }
        self.bytes += bytes;
        self.entries.insert(Arc::clone(&value), bytes);
        value
    }

    /// Number of values.
    pub fn size(&self) -> usize {
        self.entries.len()
    }

    /// Drops the values that only the table uses.
    fn sweep(&mut self) {
        self.entries.retain(|value, bytes| {
            let used = Arc::strong_count(value) > 1;
            self.bytes -= if used { 0 } else { *bytes };
            used
        });
        self.entries.shrink_to(2 * self.entries.len());
        self.swept = self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_kept_while_it_is_used_and_swept_afterwards() {
        let mut table = InternTable::<str>::default();
        let kept = table.insert("kept", 4);
        for number in 0..100_000 {
            drop(table.insert(number.to_string(), 1_000));
            assert!(table.bytes <= 3 * MIN_SWEPT_BYTES, "{} bytes after {number}", table.bytes);
        }
        assert!(table.size() < 3_000, "{} values", table.size());
        assert!(Arc::ptr_eq(&kept, &table.get("kept").unwrap()));
    }

    #[test]
    fn few_large_values_are_swept_as_early_as_many_small_ones() {
        let mut table = InternTable::<str>::default();
        for number in 0..100 {
            drop(table.insert(number.to_string(), MIN_SWEPT_BYTES));
        }
        assert!(table.size() <= 3, "{} values", table.size());
    }

    #[test]
    fn the_table_grows_with_what_is_used_and_sweeps_stay_rare() {
        let mut table = InternTable::<str>::default();
        let mut used = Vec::new();
        let mut sweeps = 0;
        for number in 0..100_000 {
            let before = table.swept;
            used.push(table.insert(number.to_string(), 1_000));
            sweeps += u32::from(table.swept != before);
        }
        assert_eq!(table.size(), used.len());
        assert!(sweeps <= 8, "{sweeps} sweeps");
    }
}
