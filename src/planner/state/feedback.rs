//! What one solve reports to the next: facts about topology domains that are known only once nodes are purchased.

use crate::groups::topology::domains::{Domains, Room};

/// Input of a solve: the union of what earlier solves of the same problem found.
#[derive(Default)]
pub(crate) struct Feedback {
    /// Domains in which a purchased node makes kube-scheduler count a domain that the spread assignment left out.
    pub occupied_domains: Domains,
    /// Pods placed per domain, of groups that were assigned more pods than found capacity there.
    pub room: Room,
    /// Highest priority of the unplaced pods that could have been placed first.
    pub displaced_priority: Option<i32>,
}
