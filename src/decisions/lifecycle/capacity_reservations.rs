//! Nodes whose capacity reservation has ended, and nodes whose capacity block is about to end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::instance::Instance;
use stowage_model::labels;
use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

/// Names of claims and registered Nodes whose labels are out of date: EC2 keeps an instance running as on-demand when its reservation
/// ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demotions {
    pub claims: Vec<String>,
    pub nodes: Vec<String>,
}

fn is_labeled_reserved(own: &BTreeMap<String, String>) -> bool {
    own.get(labels::CAPACITY_TYPE).is_some_and(|value| value == CapacityType::Reserved.as_str())
}

/// Claims that are not deleting and are labeled as reserved, or whose registered Node is: the claim, the name of such a Node, and
/// whether the claim is labeled.
fn reserved(state: &ClusterState) -> impl Iterator<Item = (&Arc<NodeClaim>, Option<String>, bool)> {
    state.claims.values().filter(|claim| !claim.is_deleting()).filter_map(|claim| {
        let node = state.node_of(claim).filter(|node| node.is_labeled(labels::REGISTERED));
        let node = node.filter(|node| is_labeled_reserved(node.labels())).map(|node| node.name_any());
        let labeled = is_labeled_reserved(claim.labels());
        (labeled || node.is_some()).then_some((claim, node, labeled))
    })
}

/// Whether a claim or a registered Node is labeled as reserved.
pub fn has_reserved(state: &ClusterState) -> bool {
    reserved(state).next().is_some()
}

/// How long after a launch EC2 may describe an instance without the reservation that it was launched into.
const ATTRIBUTES_COMPLETE: Duration = Duration::from_mins(5);

/// Claims and Nodes that are no longer in a reservation. Instances of the last five minutes are not evaluated: nothing would relabel
/// them as reserved again.
pub fn demoted(state: &ClusterState, instances: &[Instance], now: UnixMillis) -> Demotions {
    let on_demand = |claim: &NodeClaim| {
        let id = claim.provider_id();
        let instance = instances.iter().find(|instance| Some(instance.provider_id.as_str()) == id);
        let described = instance.filter(|instance| instance.launched_at.is_older_than(ATTRIBUTES_COMPLETE, now));
        described.is_some_and(|instance| instance.capacity_type == CapacityType::OnDemand)
    };
    let mut out = Demotions::default();
    for (claim, node, labeled) in reserved(state).filter(|(claim, ..)| on_demand(claim)) {
        out.claims.extend(labeled.then(|| claim.name_any()));
        out.nodes.extend(node);
    }
    out
}

/// How long before the end of a capacity block EC2 starts to terminate its instances.
const RECLAIMED_BEFORE: Duration = Duration::from_mins(30);

/// Claims in capacity blocks that are expiring according to the status of their class, and that are not marked yet to leave before EC2 starts to
/// terminate the instances; with that mark.
pub fn expiring(state: &ClusterState) -> Vec<(Arc<NodeClaim>, DisruptionMark)> {
    let mark = |claim: &NodeClaim| {
        let id = claim.labels().get(labels::CAPACITY_RESERVATION_ID)?;
        let class = state.classes.get(&claim.spec.node_class_ref.name)?;
        let mut known = class.status.iter().flat_map(|status| &status.capacity_reservations);
        let block = known.find(|known| known.state == "expiring" && known.id == *id)?;
        let deadline = UnixMillis::from(block.end_time.as_ref()?) - RECLAIMED_BEFORE;
        let mark = DisruptionMark { reason: DisruptionReason::CapacityBlockExpiring, deadline: Some(deadline) };
        mark.replaces(DisruptionMark::of(claim)).then_some(mark)
    };
    let live = state.claims.values().filter(|claim| !claim.is_deleting());
    let reserved = live.filter(|claim| is_labeled_reserved(claim.labels()));
    reserved.filter_map(|claim| Some((Arc::clone(claim), mark(claim)?))).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;
    use stowage_model::reservation::{ReservationKind, ReservedIn};
    use stowage_test_objects as objects;

    use super::*;

    fn instance(id: &str, capacity_type: CapacityType) -> Instance {
        let reserved = ReservedIn { id: "cr-1".into(), kind: ReservationKind::OnDemand };
        let reservation = Some(reserved).filter(|_| capacity_type == CapacityType::Reserved);
        Instance { capacity_type, reservation, ..objects::instance(id, "", 0) }
    }

    fn claim(name: &str, id: &str, capacity_type: &str, deleting: bool) -> NodeClaim {
        let own = json!({(labels::CAPACITY_TYPE): capacity_type, (labels::CAPACITY_RESERVATION_ID): "cr-1"});
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        let meta = json!({"labels": own, "deletionTimestamp": deletion});
        objects::claim(name, &json!({"metadata": meta, "status": objects::launched(id, &[])}))
    }

    fn node(name: &str, id: &str, capacity_type: &str, registered: bool) -> Node {
        let own = json!({(labels::CAPACITY_TYPE): capacity_type, (labels::REGISTERED): registered.to_string()});
        let spec = json!({"providerID": format!("aws:///z/{id}")});
        objects::node(name, &json!({"metadata": {"labels": own}, "spec": spec}))
    }

    #[test]
    fn c40_a_claim_and_its_node_without_reservation_are_demoted() {
        let mut state = ClusterState::default();
        state.apply_claim(claim("both", "i-1", "reserved", false));
        state.apply_node(node("node-1", "i-1", "reserved", true));
        state.apply_claim(claim("reserved", "i-2", "reserved", false));
        state.apply_node(node("node-2", "i-2", "reserved", true));
        state.apply_claim(claim("claim done", "i-3", "on-demand", false));
        state.apply_node(node("node-3", "i-3", "reserved", true));
        state.apply_claim(claim("booting", "i-4", "reserved", false));
        state.apply_node(node("node-4", "i-4", "reserved", false));
        state.apply_claim(claim("deleting", "i-5", "reserved", true));
        state.apply_claim(claim("gone", "i-6", "reserved", false));
        let lost = ["i-1", "i-3", "i-4", "i-5"].map(|id| instance(id, CapacityType::OnDemand));
        let mut instances = lost.to_vec();
        instances.push(instance("i-2", CapacityType::Reserved));
        let early = UnixMillis(0) + ATTRIBUTES_COMPLETE - Duration::from_millis(1);
        assert_eq!(
            demoted(&state, &instances, early),
            Demotions::default(),
            "EC2 may omit attributes of a new instance"
        );
        let found = demoted(&state, &instances, UnixMillis(0) + ATTRIBUTES_COMPLETE);
        assert_eq!(found.claims, ["booting", "both"]);
        assert_eq!(found.nodes, ["node-1", "node-3"], "an unregistered Node is synced from its claim");
    }

    #[test]
    fn c40_claims_of_an_expiring_capacity_block_leave_before_ec2_terminates_them() {
        let mut state = ClusterState::default();
        let marked = |name: &str, mark: &str| {
            let mut marked = claim(name, name, "reserved", false);
            marked.annotations_mut().insert(labels::DISRUPTING.to_owned(), mark.to_owned());
            marked
        };
        state.apply_claim(claim("reserved", "i-1", "reserved", false));
        state.apply_claim(claim("deleting", "i-2", "reserved", true));
        state.apply_claim(claim("demoted", "i-3", "on-demand", false));
        state.apply_claim(marked("drifted", "Drifted/"));
        state.apply_claim(marked("interrupted", "SpotInterruption/2026-01-01T00:02:00Z"));
        state.apply_claim(marked("marked", "capacity_block_expiring/2026-01-01T12:00:00Z"));
        let block = |state: &str, end: &str| {
            let block = json!({"id": "cr-1", "availabilityZone": "z", "instanceMatchCriteria": "targeted", "ownerID": "1",
                "instanceType": "p5.48xlarge", "reservationType": "capacity-block", "state": state, "endTime": end});
            Arc::new(objects::node_class("default", &json!({"status": {"capacityReservations": [block]}})))
        };
        assert!(expiring(&state).is_empty(), "the class is unknown");
        state.classes.insert("default".into(), block("active", "2026-01-01T12:30:00Z"));
        assert!(expiring(&state).is_empty());
        let mut found = |end: &str| {
            state.classes.insert("default".into(), block("expiring", end));
            let found = expiring(&state);
            found.iter().map(|(claim, mark)| (claim.name_any(), mark.annotation())).collect::<Vec<_>>()
        };
        let leaves = |name: &str, at: &str| (name.to_owned(), format!("capacity_block_expiring/{at}"));
        let noon = "2026-01-01T12:00:00Z";
        assert_eq!(found("2026-01-01T12:30:00Z"), [leaves("drifted", noon), leaves("reserved", noon)]);
        let earlier = "2026-01-01T11:00:00Z";
        assert_eq!(
            found("2026-01-01T11:30:00Z"),
            [leaves("drifted", earlier), leaves("marked", earlier), leaves("reserved", earlier)],
            "the block ends earlier than it did"
        );
    }
}
