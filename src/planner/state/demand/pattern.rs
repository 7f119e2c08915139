//! Packing patterns, and bins to pack.

use crate::groups::existing_nodes::HostState;

/// A packing pattern: the multiset of pods on one node, as items and pod counts.
pub(crate) type Pattern = Vec<(usize, usize)>;

/// Adds pods of an item to a pattern.
pub(crate) fn add_pods(pattern: &mut Pattern, item: usize, count: usize) {
    match pattern.iter_mut().find(|(have, _)| *have == item) {
        Some((_, have)) => *have += count,
        None => pattern.push((item, count)),
    }
}

/// Removes pods of an item from a pattern.
pub(crate) fn remove_pods(pattern: &mut Pattern, item: usize, count: usize) {
    if let Some((_, have)) = pattern.iter_mut().find(|(have, _)| *have == item) {
        *have = have.saturating_sub(count);
    }
    pattern.retain(|(_, count)| *count > 0);
}

/// A node to fill: its capacity, the host state without the pattern, and the pattern it holds already.
pub(crate) struct Bin<'b> {
    pub room: &'b [i64],
    pub host: &'b HostState,
    pub pattern: &'b [(usize, usize)],
}
