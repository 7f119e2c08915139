//! Volumes of a drained node: its instance is terminated when they are detached, so that the pods that follow can attach them at once and nothing that was
//! written is lost (Karpenter core reference 5.9).

use std::collections::BTreeSet;
use std::time::Duration;

use stowage_api::{NodeClaim, conditions};
use stowage_model::time::UnixMillis;

use crate::decisions::termination::deadlines::termination_deadline;
use crate::decisions::termination::drain_order::waiting;
use crate::state::object_ext::NodeClaimExt;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// Without a deadline, volumes are waited for at most for this time: a CSI driver that is gone detaches none. The Kubernetes controller detaches by
/// force after six minutes.
const MAX_DETACHMENT: Duration = Duration::from_mins(10);

/// Whether the instance of a drained node may be terminated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detachment {
    /// No volume is attached.
    Done,
    /// These PersistentVolumes are attached.
    Wait(Vec<String>),
    /// Volumes are attached, and they are not waited for any more, for this reason.
    GiveUp(&'static str),
}

/// The state of the volumes of a claim's node.
pub fn detachment(state: &ClusterState, claim: &NodeClaim, node: &str, now: UnixMillis) -> Detachment {
    if claim.has_condition(conditions::INSTANCE_TERMINATING) {
        return Detachment::Done;
    }
    let attached = attached(state, claim, node, now);
    if attached.is_empty() {
        return Detachment::Done;
    }
    if termination_deadline(claim).is_some_and(|deadline| now > deadline) {
        return Detachment::GiveUp(conditions::GRACE_PERIOD_ELAPSED);
    }
    let condition = claim.condition(conditions::VOLUMES_DETACHED);
    let is_over = condition.is_some_and(|condition| {
        condition.status != "True"
            && UnixMillis::from(&condition.last_transition_time).is_older_than(MAX_DETACHMENT, now)
    });
    let has_given_up = condition.is_some_and(|condition| condition.status == "False");
    if is_over || has_given_up {
        Detachment::GiveUp(conditions::DETACHMENT_TIMEOUT)
    } else {
        Detachment::Wait(attached)
    }
}

/// PersistentVolumes that are attached to the node, but for those of pods that the drain leaves on it, such as DaemonSet pods that tolerate the taint.
fn attached(state: &ClusterState, claim: &NodeClaim, node: &str, now: UnixMillis) -> Vec<String> {
    let attached: BTreeSet<&str> = state.attachments.on(node).collect();
    if attached.is_empty() {
        return Vec::new();
    }
    let waiting: BTreeSet<String> = waiting(state, claim, node, now).into_iter().map(PodRecord::key).collect();
    let staying = state.pods_on(node).filter(|pod| pod.active() && !waiting.contains(&pod.key()));
    let claims = staying.filter_map(|pod| pod.entry.as_ref().ok()).flat_map(|entry| entry.claims.iter());
    let kept: BTreeSet<&str> = claims.filter_map(|name| state.volumes.claims.get(&**name)?.volume.as_deref()).collect();
    attached.difference(&kept).map(|name| (*name).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;

    const NOW: UnixMillis = UnixMillis(1_800_000_000_000);

    fn attach(state: &mut ClusterState, volume: &str, node: &str) {
        let source = json!({ "persistentVolumeName": volume });
        let spec = json!({"attacher": "ebs.csi.aws.com", "nodeName": node, "source": source});
        let object = json!({"metadata": {"name": format!("{volume}-{node}")}, "spec": spec});
        state.attachments.apply(&serde_json::from_value(object).unwrap());
    }

    /// A pod on x with a claim of this volume.
    fn pod(state: &mut ClusterState, name: &str, volume: &str, patch: &Value) {
        let claim = json!({"metadata": {"name": name, "namespace": "n"}, "spec": {"volumeName": volume}});
        state.apply_volume_claim(&serde_json::from_value(claim).unwrap());
        let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": name}}]);
        let mut object =
            json!({"spec": {"nodeName": "x", "volumes": volumes, "containers": [{"name": "c", "image": "i"}]}});
        json_patch::merge(&mut object, patch);
        state.apply_pod(&objects::pod(name, &object), NOW);
    }

    fn claim(annotations: &Value, conditions: &Value) -> NodeClaim {
        let meta = json!({"annotations": annotations, "deletionTimestamp": (NOW - Duration::from_hours(1)).rfc3339(), "finalizers": ["f"]});
        objects::claim("c", &json!({"metadata": meta, "status": {"conditions": conditions}}))
    }

    #[test]
    fn b59_volumes_are_waited_for_but_not_those_of_pods_that_stay() {
        let plain = claim(&json!({}), &json!([]));
        let mut state = ClusterState::default();
        let found = |state: &ClusterState| detachment(state, &plain, "x", NOW);
        attach(&mut state, "pv-other", "y");
        assert_eq!(found(&state), Detachment::Done, "of another node");
        attach(&mut state, "pv-gone", "x");
        assert_eq!(found(&state), Detachment::Wait(vec!["pv-gone".into()]), "its pod is gone");
        state.attachments.delete("pv-gone-x");
        attach(&mut state, "pv-agent", "x");
        let tolerates = json!({"spec": {"tolerations": [{"operator": "Exists"}]}});
        pod(&mut state, "agent", "pv-agent", &tolerates);
        assert_eq!(found(&state), Detachment::Done, "its pod stays until the end");
        attach(&mut state, "pv-done", "x");
        pod(&mut state, "done", "pv-done", &json!({"status": {"phase": "Succeeded"}}));
        assert_eq!(found(&state), Detachment::Wait(vec!["pv-done".into()]), "a pod that ended needs it no more");
        let stuck = json!({"metadata": {"deletionTimestamp": (NOW - Duration::from_mins(5)).rfc3339()}});
        pod(&mut state, "done", "pv-done", &stuck);
        assert_eq!(found(&state), Detachment::Done, "the drain does not wait for its pod either");
    }

    #[test]
    fn f15_volumes_are_waited_for_until_the_deadline_or_ten_minutes() {
        let mut state = ClusterState::default();
        attach(&mut state, "pv", "x");
        let wait = || Detachment::Wait(vec!["pv".into()]);
        let deadline = |at: UnixMillis| json!({(labels::TERMINATION_TIMESTAMP): at.rfc3339()});
        let condition = |kind: &str, status: &str, minutes: u64| {
            let at = (NOW - Duration::from_mins(minutes)).rfc3339();
            json!([{"type": kind, "status": status, "reason": "r", "message": "", "lastTransitionTime": at}])
        };
        let kind = conditions::VOLUMES_DETACHED;
        for (case, annotations, conditions, expected) in [
            ("at first", json!({}), json!([]), wait()),
            ("for nine minutes", json!({}), condition(kind, "Unknown", 9), wait()),
            ("for ten minutes", json!({}), condition(kind, "Unknown", 10), Detachment::GiveUp("DetachmentTimeout")),
            ("given up a moment ago", json!({}), condition(kind, "False", 0), Detachment::GiveUp("DetachmentTimeout")),
            ("before the deadline", deadline(NOW + Duration::from_secs(1)), json!([]), wait()),
            (
                "after the deadline",
                deadline(NOW - Duration::from_secs(1)),
                json!([]),
                Detachment::GiveUp("TerminationGracePeriodElapsed"),
            ),
            (
                "the instance ends already",
                json!({}),
                condition(conditions::INSTANCE_TERMINATING, "True", 0),
                Detachment::Done,
            ),
        ] {
            assert_eq!(detachment(&state, &claim(&annotations, &conditions), "x", NOW), expected, "{case}");
        }
    }
}
