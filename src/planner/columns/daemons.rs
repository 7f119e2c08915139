//! The daemons that new nodes run. Their requests are subtracted from the room of each column.

use crate::columns::bitset::Bits;
use crate::columns::dims::{COMMON, fits};

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
        self.columns.contains(column) && self.has_devices(allocatable)
    }

    fn has_devices(&self, allocatable: &[i64]) -> bool {
        self.need.iter().zip(allocatable).skip(COMMON).all(|(need, have)| need <= have)
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

/// The daemons that count in a variant: those that its best column runs together, where daemons of higher precedence come first and those
/// that no longer fit stay pending, as kube-scheduler leaves them. `unavailable` has the allocatable resources of the variant's types without
/// an available offering: what is out of capacity for minutes must not change which daemons nodes are planned with.
pub fn counted<'a>(
    daemons: &[DaemonNeed],
    order: &[usize],
    columns: impl Iterator<Item = (usize, &'a Vec<i64>)>,
    unavailable: &[Vec<i64>],
    dims: usize,
) -> Vec<usize> {
    let held = |runs: &dyn Fn(&DaemonNeed) -> bool, have: &[i64]| -> Vec<bool> {
        let mut sum = vec![0; dims];
        let hold = |daemon: &usize| {
            let daemon = &daemons[*daemon];
            let mut more = sum.clone();
            add(&mut more, &daemon.need);
            let fits = !runs(daemon) || fits(&more, have);
            if fits && runs(daemon) {
                sum = more;
            }
            fits
        };
        order.iter().map(hold).collect()
    };
    let mut best = vec![false; order.len()];
    // Whether a daemon runs on a type without a column is not known: that it does is the stricter assumption.
    for have in unavailable {
        best = best.max(held(&|daemon| daemon.has_devices(have), have));
    }
    for (column, have) in columns {
        if best.iter().all(|held| *held) {
            break;
        }
        best = best.max(held(&|daemon| daemon.runs_on(column, have), have));
    }
    order.iter().zip(best).filter(|(_, held)| *held).map(|(daemon, _)| *daemon).collect()
}
