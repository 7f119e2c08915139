//! Claims that several pods use: a node attaches their volume once, however many of the pods it runs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::input::problem::Problem;

/// Share of the smallest attachment limit that shared claims may reserve, as a divisor.
const RESERVED_SHARE: usize = 4;

/// The claims that every node reserves an attachment for, by driver. Pods do not count these claims.
///
/// An attachment that depends on the other pods of a node is not a sum of requests. A reservation is valid whatever pods share a node, and wastes
/// an attachment where none of them comes; so only the claims with most pods get one, and all other claims count for each pod.
pub(crate) fn shared(problem: &Problem) -> BTreeMap<Arc<str>, BTreeSet<Arc<str>>> {
    let mut users: HashMap<&Arc<str>, usize> = HashMap::new();
    for claim in problem.pods.iter().flat_map(|pod| pod.claims.iter()) {
        *users.entry(claim).or_default() += 1;
    }
    let mut by_driver: BTreeMap<Arc<str>, Vec<(Reverse<usize>, Arc<str>)>> = BTreeMap::new();
    for (claim, pods) in users.into_iter().filter(|(_, pods)| *pods > 1) {
        if let Some(driver) = problem.volumes.driver_of(claim) {
            by_driver.entry(driver).or_default().push((Reverse(pods), Arc::clone(claim)));
        }
    }
    let mut out = BTreeMap::new();
    for (driver, mut claims) in by_driver {
        let of_types = problem.pools.iter().flat_map(|pool| &pool.catalog.instance_types).map(|t| &t.volume_limits);
        let limits = of_types.chain(problem.volumes.limits.values()).filter_map(|limits| limits.get(&driver).copied());
        let Some(smallest) = limits.filter(|limit| *limit > 0).min().and_then(|limit| usize::try_from(limit).ok())
        else {
            continue;
        };
        // A pod that fits a node fits it with the reservation, too.
        let is_attached = |claim: &&Arc<str>| problem.volumes.driver_of(claim).as_ref() == Some(&driver);
        let most = problem.pods.iter().map(|pod| pod.claims.iter().filter(is_attached).count()).max().unwrap_or(0);
        claims.sort_unstable();
        claims.truncate((smallest / RESERVED_SHARE).min(smallest.saturating_sub(most)));
        out.insert(driver, claims.into_iter().map(|(_, claim)| claim).collect());
    }
    out
}
