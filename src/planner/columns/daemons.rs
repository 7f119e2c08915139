//! The daemons that new nodes run. Their requests are subtracted from the room of each column.

use crate::planner::columns::bitset::Bits;
use crate::planner::columns::dims::{COMMON, fits};

/// The pods of a DaemonSet.
#[derive(Debug)]
pub(crate) struct DaemonNeed {
    pub need: Vec<i64>,
    pub priority: i32,
    /// The columns that they may run on.
    pub columns: Bits,
}

impl DaemonNeed {
    /// Whether a column with these allocatable resources runs one, as far as its labels, taints and devices are concerned.
    pub fn runs_on(&self, column: usize, allocatable: &[i64]) -> bool {
        self.columns.contains(column) && self.need.iter().zip(allocatable).skip(COMMON).all(|(need, have)| need <= have)
    }
}

pub fn add(sum: &mut [i64], more: &[i64]) {
    for (total, more) in sum.iter_mut().zip(more) {
        *total = total.saturating_add(*more);
    }
}

/// Daemons in the order in which they count: by priority, as kube-scheduler preempts, then small ones first.
pub fn by_precedence(daemons: &[DaemonNeed], allocatable: &[Vec<i64>]) -> Vec<usize> {
    let most = |dim: usize| allocatable.iter().map(|have| have[dim]).max().unwrap_or(0).max(1);
    let most: Vec<i64> = (0..allocatable.first().map_or(0, Vec::len)).map(most).collect();
    let share = |daemon: &DaemonNeed| {
        daemon.need.iter().zip(&most).map(|(need, most)| i128::from(*need) * 1_000_000 / i128::from(*most)).max()
    };
    let mut order: Vec<usize> = (0..daemons.len()).collect();
    order.sort_by_cached_key(|at| (std::cmp::Reverse(daemons[*at].priority), share(&daemons[*at]), *at));
    order
}

/// The daemons that count in a variant: the longest prefix of `order` that one of its columns holds, without those that no column holds
/// alone.
pub fn counted<'a>(
    daemons: &[DaemonNeed],
    order: &[usize],
    columns: impl Iterator<Item = (usize, &'a Vec<i64>)> + Clone,
    dims: usize,
) -> Vec<usize> {
    let alone = |daemon: &DaemonNeed| {
        let mut runs = columns.clone().filter(|(column, have)| daemon.runs_on(*column, have)).peekable();
        runs.peek().is_none() || runs.any(|(_, have)| fits(&daemon.need, have))
    };
    let order: Vec<usize> = order.iter().copied().filter(|daemon| alone(&daemons[*daemon])).collect();
    let mut longest = 0;
    for (column, have) in columns {
        let mut sum = vec![0; dims];
        let held = order.iter().take_while(|daemon| {
            let daemon = &daemons[**daemon];
            if daemon.runs_on(column, have) {
                add(&mut sum, &daemon.need);
            }
            fits(&sum, have)
        });
        longest = longest.max(held.count());
        if longest == order.len() {
            break;
        }
    }
    order[..longest].to_vec()
}
