//! NodeClaims that are older than their `expireAfter`: they go, whatever budgets say and whether or not their pods have another
//! place (core reference 5.7). The drain that follows is the usual one.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use crate::api::{NodeClaim, duration};
use crate::controllers::context::{Context, reference};
use crate::controllers::node_claim::{lifecycle, metrics};
use crate::state::{ClusterState, now_ms};

/// Claims are looked at at least this often.
const TICK: Duration = Duration::from_secs(10);
/// Claims are looked at no more often than this.
const LOOK: Duration = Duration::from_millis(500);

/// When a claim expires, milliseconds since the epoch; `None` for never, also where the text can't be understood.
pub fn expires_ms(claim: &NodeClaim) -> Option<i64> {
    let created = claim.metadata.creation_timestamp.as_ref()?.0.as_millisecond();
    let after = duration::parse_or_never(claim.spec.expire_after.as_deref()?).ok()??;
    created.checked_add(after)
}

/// Claims whose time has come, and when the next one's comes.
pub fn expired(state: &ClusterState, now_ms: i64) -> (Vec<Arc<NodeClaim>>, Option<i64>) {
    let (mut due, mut next) = (Vec::new(), None::<i64>);
    for claim in state.claims.values().filter(|claim| claim.metadata.deletion_timestamp.is_none()) {
        match expires_ms(claim) {
            Some(at) if at <= now_ms => due.push(Arc::clone(claim)),
            Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
            None => {}
        }
    }
    (due, next)
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    loop {
        let (due, next) = expired(&ctx.cluster.read(), now_ms());
        for claim in due {
            let after = claim.spec.expire_after.as_deref().unwrap_or_default();
            tracing::info!(claim = claim.name_any(), expire_after = after, "expired, it goes");
            ctx.event(reference(&*claim), false, "Expired", &format!("older than its expireAfter of {after}")).await;
            match lifecycle::delete_claim(&ctx, &claim).await {
                Ok(()) => metrics::count(&ctx, &claim, "expired"),
                Err(error) => {
                    tracing::warn!(claim = claim.name_any(), %error, "node claim could not be deleted, trying again");
                }
            }
        }
        let wait = next.map_or(TICK, |at| Duration::from_millis(u64::try_from(at - now_ms()).unwrap_or(0)));
        tokio::time::sleep(wait.clamp(LOOK, TICK)).await;
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::objects;

    fn claim(name: &str, expire_after: &str, deleting: bool) -> NodeClaim {
        let deletion = deleting.then_some("1970-01-01T00:00:30Z");
        let created = "1970-01-01T00:00:10Z";
        let meta = json!({"creationTimestamp": created, "deletionTimestamp": deletion, "finalizers": ["f"]});
        objects::claim(name, &json!({"metadata": meta, "spec": {"expireAfter": expire_after}}))
    }

    #[test]
    fn a_claim_goes_at_its_age_and_never_never() {
        let mut state = ClusterState::default();
        for (name, after, deleting) in
            [("minute", "1m", false), ("hour", "1h", false), ("never", "Never", false), ("going", "1s", true)]
        {
            state.apply_claim(claim(name, after, deleting));
        }
        let names = |now| {
            let (due, next) = expired(&state, now);
            (due.iter().map(|claim| claim.name_any()).collect::<Vec<_>>(), next)
        };
        assert_eq!(names(69_999), (vec![], Some(70_000)));
        assert_eq!(names(70_000), (vec!["minute".to_owned()], Some(3_610_000)));
        assert_eq!(names(i64::MAX), (vec!["hour".to_owned(), "minute".to_owned()], None));
    }
}
