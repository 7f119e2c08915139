//! Nodes that do not start up in time. While a NodePool has one, voluntary disruption buys no further node of it: that node would probably
//! not start up either, such as after a change of the NodePool that caused the drift.

use std::collections::BTreeMap;
use std::time::Duration;

use stowage_api::{NodeClaim, conditions};
use stowage_model::time::UnixMillis;

use crate::state::node_state::BOOT_TIMEOUT;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

/// A node that does not start up counts for this time since its creation: pods that run on it may keep it for ever.
const LATE_PERIOD: Duration = Duration::from_hours(1);

fn is_late(claim: &NodeClaim, now: UnixMillis) -> bool {
    let created = claim.created_at();
    !claim.is_leaving()
        && !claim.has_condition(conditions::INITIALIZED)
        && created.is_older_than(BOOT_TIMEOUT, now)
        && !created.is_older_than(LATE_PERIOD, now)
}

/// NodePools of which no replacement is bought now, with the NodeClaim whose node does not start up: it is as the NodePool is now, and no
/// later node of the NodePool was initialized.
pub fn pools_with_late_nodes(state: &ClusterState, now: UnixMillis) -> BTreeMap<String, String> {
    let mut late: BTreeMap<&str, (UnixMillis, &String)> = BTreeMap::new();
    let mut initialized: BTreeMap<&str, UnixMillis> = BTreeMap::new();
    for (name, claim) in &state.claims {
        let (Some(pool), created) = (claim.node_pool(), claim.created_at()) else { continue };
        if claim.has_condition(conditions::INITIALIZED) {
            let last = initialized.entry(pool).or_insert(created);
            *last = created.max(*last);
        } else if is_late(claim, now) && !claim.has_condition(conditions::DRIFTED) {
            let last = late.entry(pool).or_insert((created, name));
            *last = (created, name).max(*last);
        }
    }
    late.retain(|pool, (created, _)| initialized.get(pool).is_none_or(|last| last < created));
    late.into_iter().map(|(pool, (_, claim))| (pool.to_owned(), claim.clone())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;

    const NOW: UnixMillis = UnixMillis(10_000_000);

    /// A NodeClaim of the NodePool p that was created this long ago, and has these conditions.
    fn put(state: &mut ClusterState, name: &str, age: Duration, conditions: &[&str], annotations: &serde_json::Value) {
        let meta = json!({"creationTimestamp": (NOW - age).rfc3339(), "labels": {(labels::NODE_POOL): "p"},
            "annotations": annotations});
        let status = objects::launched(name, conditions);
        state.apply_claim(objects::claim(name, &json!({"metadata": meta, "status": status})));
    }

    #[test]
    fn a_pool_buys_no_replacement_while_its_newest_node_does_not_start_up() {
        const LATE: Duration = BOOT_TIMEOUT;
        let (minute, hour) = (Duration::from_mins(1), Duration::from_hours(1));
        let none = json!({});
        for (case, age, conditions, annotations, other, blocked) in [
            ("late", LATE, &[][..], &none, None, true),
            ("in time", minute * 4, &[], &none, None, false),
            ("initialized", LATE, &["Initialized"], &none, None, false),
            ("of an earlier NodePool", LATE, &["Drifted"], &none, None, false),
            ("leaving", LATE, &[], &json!({(labels::DISRUPTING): "Expired/"}), None, false),
            ("almost an hour", minute * 59, &[], &none, None, true),
            ("an hour", hour, &[], &none, None, false),
            ("a later node started up", LATE, &[], &none, Some(minute * 4), false),
            ("a node of the same time started up", LATE, &[], &none, Some(LATE), false),
            ("an earlier node started up", LATE, &[], &none, Some(LATE + minute), true),
        ] {
            let mut state = ClusterState::default();
            put(&mut state, "r", age, conditions, annotations);
            if let Some(age) = other {
                put(&mut state, "other", age, &["Initialized"], &none);
            }
            let expected = blocked.then(|| ("p".to_owned(), "r".to_owned()));
            assert_eq!(pools_with_late_nodes(&state, NOW), expected.into_iter().collect(), "{case}");
        }
    }
}
