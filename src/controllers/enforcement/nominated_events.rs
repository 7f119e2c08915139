//! Events on pods that name the NodeClaim and the Node where room is kept for them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt;
use stowage_model::events;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::{Context, pod_reference};
use crate::decisions::provisioning::unschedulable::in_turns;
use crate::state::ClusterState;
use crate::state::plan_record::Holds;
use crate::state::pool_types::offering_of;

const PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of pods that are reported in a [`PERIOD`]: the plans of a burst have thousands, and their NodeClaims name them, too.
const MOST: usize = 20;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut reported = Reported::default();
    loop {
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
        let due = {
            let state = ctx.cluster.read();
            let holds = ctx.derived.holds(&state, clock::now());
            reported.due(&state, &holds)
        };
        for (pod, note) in due {
            ctx.emit(pod, events::NOMINATED.note(&note)).await;
            heartbeat::progress();
        }
    }
}

/// The NodeClaim that was reported, by UID of the pod.
#[derive(Debug, Default)]
struct Reported(HashMap<String, String>);

impl Reported {
    /// The pods without a node that are reported now, namespaces in turns; the others later.
    fn due(&mut self, state: &ClusterState, holds: &Holds) -> Vec<(ObjectReference, String)> {
        let (mut before, mut due) = (std::mem::take(&mut self.0), BTreeMap::<&str, Vec<_>>::new());
        for (key, claim) in &holds.by_pod {
            let Some(pod) = state.pods.get(key).filter(|pod| pod.node.is_none() && pod.active()) else { continue };
            match before.remove_entry(&pod.uid).filter(|(_, known)| known == claim) {
                Some((uid, known)) => {
                    self.0.insert(uid, known);
                }
                None => due.entry(&pod.namespace).or_default().push((&pod.name, pod, claim)),
            }
        }
        for pods in due.values_mut() {
            pods.sort_by_key(|(name, ..)| *name);
        }
        let due = in_turns(due, MOST).into_iter();
        due.map(|(_, pod, claim)| {
            self.0.insert(pod.uid.clone(), claim.clone());
            (pod_reference(&pod.namespace, &pod.name, &pod.uid), note(state, claim))
        })
        .collect()
    }
}

/// Where the pod is planned, in the form that Karpenter has: `nodeclaim/NAME, node/NAME`.
fn note(state: &ClusterState, name: &str) -> String {
    let claim = state.claims.get(name);
    let node = claim.and_then(|claim| state.node_of(claim)).map(|node| format!(", node/{}", node.name_any()));
    let offering = claim
        .and_then(|claim| offering_of(claim))
        .map(|(instance_type, zone, capacity_type)| format!(": {instance_type} in {zone}, {}", capacity_type.as_str()));
    format!("planned on nodeclaim/{name}{}{}", node.unwrap_or_default(), offering.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::labels;
    use stowage_model::time::UnixMillis;
    use stowage_test_objects as objects;

    use super::*;

    fn state(pods: &[(&str, &str)]) -> ClusterState {
        let mut state = ClusterState::default();
        let metadata = json!({"annotations": {(labels::PLANNED_OFFERING): "m5.large/us-east-1a/spot"}});
        for name in ["a", "b"] {
            state.apply_claim(objects::claim(
                name,
                &json!({"metadata": metadata, "status": objects::launched(name, &[])}),
            ));
        }
        state.apply_node(objects::node("n", &json!({"spec": {"providerID": "aws:///z/b"}})));
        for (namespace, name) in pods {
            let metadata = json!({"namespace": namespace, "uid": format!("{namespace}-{name}")});
            state.apply_pod(&objects::pod(name, &json!({"metadata": metadata})), UnixMillis(1));
        }
        state
    }

    fn holds(pods: &[(&str, &str)]) -> Holds {
        let by_pod = pods.iter().map(|(pod, claim)| ((*pod).to_owned(), (*claim).to_owned())).collect();
        Holds { by_pod, ..Holds::default() }
    }

    fn named(due: &[(ObjectReference, String)]) -> Vec<String> {
        due.iter().map(|(pod, note)| format!("{}: {note}", pod.name.clone().unwrap_or_default())).collect()
    }

    #[test]
    fn a_pod_is_reported_once_for_each_node_claim_that_keeps_room_for_it() {
        let (mut state, mut reported) = (state(&[("x", "p"), ("x", "q"), ("x", "r")]), Reported::default());
        let [on_a, on_b] =
            ["nodeclaim/a: m5.large in us-east-1a, spot", "nodeclaim/b, node/n: m5.large in us-east-1a, spot"];
        let both = holds(&[("x/p", "a"), ("x/q", "b"), ("x/gone", "a")]);
        assert_eq!(
            named(&reported.due(&state, &both)),
            [format!("p: planned on {on_a}"), format!("q: planned on {on_b}")]
        );
        assert!(reported.due(&state, &both).is_empty());
        let moved = holds(&[("x/p", "b"), ("x/q", "b")]);
        assert_eq!(named(&reported.due(&state, &moved)), [format!("p: planned on {on_b}")]);
        state.apply_pod(
            &objects::pod("r", &json!({"metadata": {"namespace": "x", "uid": "x-r"}, "spec": {"nodeName": "n"}})),
            UnixMillis(2),
        );
        assert!(reported.due(&state, &holds(&[("x/r", "b")])).is_empty(), "it is bound");
        assert!(reported.0.is_empty(), "what is not held is forgotten");
    }

    #[test]
    fn a_namespace_full_of_planned_pods_is_reported_bit_by_bit_and_keeps_no_other_out() {
        let names: Vec<String> = (0..50).map(|number| format!("p{number:02}")).collect();
        let mut pods: Vec<(&str, &str)> = names.iter().map(|name| ("many", name.as_str())).collect();
        pods.push(("one", "q"));
        let (state, mut reported) = (state(&pods), Reported::default());
        let keys: Vec<String> = pods.iter().map(|(namespace, name)| format!("{namespace}/{name}")).collect();
        let holds = holds(&keys.iter().map(|key| (key.as_str(), "a")).collect::<Vec<_>>());
        let first = reported.due(&state, &holds);
        assert!(first.iter().any(|(pod, _)| pod.name.as_deref() == Some("q")));
        let rest: Vec<usize> = (0..3).map(|_| reported.due(&state, &holds).len()).collect();
        assert_eq!((first.len(), rest), (20, vec![20, 11, 0]));
    }
}
