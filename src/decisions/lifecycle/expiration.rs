//! Expiration: NodeClaims older than their `expireAfter` are deleted, regardless of budgets and of replacements (Karpenter core
//! reference 5.7). Their nodes are drained as usual. In the last part of their lifetime, nodes are replaced as drifted ones are
//! ([`crate::decisions::disruption::outdated`]), so that few are left to be deleted.

use std::sync::Arc;
use std::time::Duration;

use stowage_api::{NodeClaim, duration};
use stowage_model::time::UnixMillis;

use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

/// Nodes are replaced in the last tenth of their lifetime, and in the last week at most: budgets with a schedule are open once a week or more often.
const SHARE_OF_LIFETIME: i64 = 10;
const MAX_TIME: Duration = Duration::from_hours(7 * 24);

/// When a claim expires; `None` for never, and for an invalid duration.
pub fn expires_at(claim: &NodeClaim) -> Option<UnixMillis> {
    let created = UnixMillis::from(claim.metadata.creation_timestamp.as_ref()?);
    let after = duration::parse_or_never(claim.spec.expire_after.as_deref()?).ok()??;
    created.0.checked_add(after).map(UnixMillis)
}

/// When a node is old enough to be replaced before it expires; `None` for never.
pub fn replaced_from(claim: &NodeClaim) -> Option<UnixMillis> {
    let expires_at = expires_at(claim)?;
    let lifetime = expires_at.0.saturating_sub(claim.created_at().0);
    let max = i64::try_from(MAX_TIME.as_millis()).unwrap_or(i64::MAX);
    Some(UnixMillis(expires_at.0 - (lifetime / SHARE_OF_LIFETIME).min(max)))
}

/// When the next node becomes old enough ([`replaced_from`]).
pub fn next_replaced_from(state: &ClusterState, now: UnixMillis) -> Option<UnixMillis> {
    let claims = state.claims.values().filter(|claim| !claim.is_leaving());
    claims.filter_map(|claim| replaced_from(claim)).filter(|at| *at > now).min()
}

/// How much of its lifetime a claim has left, in permille.
pub fn remaining_lifetime(claim: &NodeClaim, now: UnixMillis) -> i64 {
    let Some(expires_at) = expires_at(claim) else { return 1_000 };
    let whole = expires_at.0.saturating_sub(claim.created_at().0).max(1);
    let left = expires_at.0.saturating_sub(now.0).clamp(0, whole);
    i64::try_from(i128::from(left) * 1_000 / i128::from(whole)).unwrap_or(0)
}

/// Expired claims, and when the next claim expires.
pub fn expired(state: &ClusterState, now: UnixMillis) -> (Vec<Arc<NodeClaim>>, Option<UnixMillis>) {
    let (mut due, mut next) = (Vec::new(), None::<UnixMillis>);
    for claim in state.claims.values().filter(|claim| !claim.is_deleting()) {
        match expires_at(claim) {
            Some(at) if at <= now => due.push(Arc::clone(claim)),
            Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
            None => {}
        }
    }
    (due, next)
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt;
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    fn claim(name: &str, expire_after: &str, deleting: bool) -> NodeClaim {
        let deletion = deleting.then_some("1970-01-01T00:00:30Z");
        let created = "1970-01-01T00:00:10Z";
        let meta = json!({"creationTimestamp": created, "deletionTimestamp": deletion, "finalizers": ["f"]});
        objects::claim(name, &json!({"metadata": meta, "spec": {"expireAfter": expire_after}}))
    }

    #[test]
    fn a_claim_expires_at_its_age_and_not_with_never() {
        let mut state = ClusterState::default();
        for (name, after, deleting) in
            [("minute", "1m", false), ("hour", "1h", false), ("never", "Never", false), ("deleting", "1s", true)]
        {
            state.apply_claim(claim(name, after, deleting));
        }
        let names = |now| {
            let (due, next) = expired(&state, UnixMillis(now));
            (due.iter().map(|claim| claim.name_any()).collect::<Vec<_>>(), next.map(|at| at.0))
        };
        assert_eq!(names(69_999), (vec![], Some(70_000)));
        assert_eq!(names(70_000), (vec!["minute".to_owned()], Some(3_610_000)));
        assert_eq!(names(i64::MAX), (vec!["hour".to_owned(), "minute".to_owned()], None));
    }

    #[test]
    fn a_node_is_replaced_in_the_last_tenth_of_its_lifetime_at_most_a_week() {
        let hours = |after: &str| replaced_from(&claim("c", after, false)).map(|at| (at.0 - 10_000) / 3_600_000);
        for (after, expected) in [
            ("720h", Some(648)),
            ("10h", Some(9)),
            ("8760h", Some(8760 - 168)),
            ("0s", Some(0)),
            ("Never", None),
            ("soon", None),
        ] {
            assert_eq!(hours(after), expected, "{after}");
        }
        let mut state = ClusterState::default();
        for (name, after, deleting) in [("a", "100s", false), ("b", "200s", false), ("c", "1s", true)] {
            state.apply_claim(claim(name, after, deleting));
        }
        let next = |seconds: i64| next_replaced_from(&state, UnixMillis(seconds * 1_000)).map(|at| at.0 / 1_000);
        assert_eq!([0, 99, 100, 189, 190].map(next), [Some(100), Some(100), Some(190), Some(190), None]);
    }

    #[test]
    fn the_remaining_lifetime_is_a_permille() {
        let after =
            |after: &str, seconds: i64| remaining_lifetime(&claim("c", after, false), UnixMillis(seconds * 1_000));
        assert_eq!([0, 10, 60, 110, 999].map(|now| after("100s", now)), [1_000, 1_000, 500, 0, 0]);
        assert_eq!((after("Never", 999), after("soon", 999)), (1_000, 1_000));
        assert_eq!(after("0s", 10), 0);
    }
}
