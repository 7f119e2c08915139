//! The conditions of objects as metrics and events show them (Karpenter core reference 8 and 9), and their transitions.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::labels;
use stowage_model::time::UnixMillis;

/// Conditions of an object that count: a kubelet may write any number of them.
const MAX_CONDITIONS: usize = 64;
/// Longest type, status and reason that count, in bytes.
const MAX_TEXT: usize = 256;

/// A condition of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConditionView<'o> {
    pub kind: &'o str,
    pub status: &'o str,
    pub reason: &'o str,
    pub message: &'o str,
    /// Its last transition.
    pub since: UnixMillis,
}

impl<'o> From<&'o Condition> for ConditionView<'o> {
    fn from(condition: &'o Condition) -> Self {
        Self {
            kind: &condition.type_,
            status: &condition.status,
            reason: &condition.reason,
            message: &condition.message,
            since: UnixMillis::from(&condition.last_transition_time),
        }
    }
}

fn bounded<'o>(conditions: impl Iterator<Item = ConditionView<'o>>) -> Vec<ConditionView<'o>> {
    let is_short =
        |one: &ConditionView<'o>| [one.kind, one.status, one.reason].iter().all(|text| text.len() <= MAX_TEXT);
    conditions.filter(is_short).take(MAX_CONDITIONS).collect()
}

/// An object whose conditions have metrics.
pub trait Conditioned {
    /// Labels of the object that are labels of its metrics.
    const LABELS: &'static [&'static str];

    fn meta(&self) -> &ObjectMeta;

    fn conditions(&self) -> Vec<ConditionView<'_>>;
}

impl Conditioned for NodeClaim {
    const LABELS: &'static [&'static str] = &[labels::EC2_NODE_CLASS, labels::NODE_POOL];

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn conditions(&self) -> Vec<ConditionView<'_>> {
        bounded(self.status.iter().flat_map(|status| &status.conditions).map(ConditionView::from))
    }
}

impl Conditioned for NodePool {
    const LABELS: &'static [&'static str] = &[];

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn conditions(&self) -> Vec<ConditionView<'_>> {
        bounded(self.status.iter().flat_map(|status| &status.conditions).map(ConditionView::from))
    }
}

impl Conditioned for Ec2NodeClass {
    const LABELS: &'static [&'static str] = &[];

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn conditions(&self) -> Vec<ConditionView<'_>> {
        bounded(self.status.iter().flat_map(|status| &status.conditions).map(ConditionView::from))
    }
}

impl Conditioned for Node {
    const LABELS: &'static [&'static str] = &[labels::EC2_NODE_CLASS, labels::NODE_POOL, labels::INITIALIZED];

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn conditions(&self) -> Vec<ConditionView<'_>> {
        let conditions = self.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let view = conditions.map(|condition| ConditionView {
            kind: &condition.type_,
            status: &condition.status,
            reason: condition.reason.as_deref().unwrap_or_default(),
            message: condition.message.as_deref().unwrap_or_default(),
            since: condition.last_transition_time.as_ref().map(UnixMillis::from).unwrap_or_default(),
        });
        bounded(view)
    }
}

/// An object that changed, as it was and is. Objects of one name with different UIDs are two.
#[derive(Debug)]
pub struct Change<T> {
    pub old: Option<Arc<T>>,
    pub new: Option<Arc<T>>,
}

/// The objects of a kind, as they were when they were last followed.
#[derive(Debug)]
pub struct Followed<T>(Option<BTreeMap<String, Arc<T>>>);

impl<T> Default for Followed<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: Conditioned> Followed<T> {
    /// What changed since the last call; nothing at the first one, which does not know what was.
    pub fn changes(&mut self, objects: &BTreeMap<String, Arc<T>>) -> Vec<Change<T>> {
        let Some(seen) = &mut self.0 else {
            self.0 = Some(objects.clone());
            return Vec::new();
        };
        let (mut changed, mut gone) = (Vec::new(), Vec::new());
        let mut before = seen.iter().peekable();
        for (name, object) in objects {
            while let Some((old, _)) = before.next_if(|(old, _)| *old < name) {
                gone.push(old.clone());
            }
            match before.next_if(|(old, _)| *old == name) {
                Some((_, old)) if Arc::ptr_eq(old, object) => {}
                _ => changed.push((name.clone(), Arc::clone(object))),
            }
        }
        gone.extend(before.map(|(old, _)| old.clone()));
        let mut out = Vec::new();
        for (name, object) in changed {
            match seen.insert(name, Arc::clone(&object)) {
                Some(old) if old.meta().uid != object.meta().uid => {
                    out.push(Change { old: Some(old), new: None });
                    out.push(Change { old: None, new: Some(object) });
                }
                old => out.push(Change { old, new: Some(object) }),
            }
        }
        out.extend(gone.iter().filter_map(|name| Some(Change { old: Some(seen.remove(name)?), new: None })));
        out
    }
}

/// A condition that has another status than before, or that is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition<'o> {
    pub from: Option<ConditionView<'o>>,
    pub to: ConditionView<'o>,
}

/// The transitions of an object since it was `old`.
pub fn transitions<'o, T: Conditioned>(old: Option<&'o T>, new: &'o T) -> Vec<Transition<'o>> {
    let before = old.map(Conditioned::conditions).unwrap_or_default();
    let from = |kind: &str| before.iter().find(|condition| condition.kind == kind).copied();
    let all = new.conditions().into_iter().map(|to| Transition { from: from(to.kind), to });
    all.filter(|transition| transition.from.is_none_or(|from| from.status != transition.to.status)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;

    fn claim(name: &str, uid: &str, ready: &[(&str, &str)]) -> Arc<NodeClaim> {
        let condition = |(status, reason): &(&str, &str)| json!({"type": "Ready", "status": status, "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let conditions: Vec<Value> = ready.iter().map(condition).collect();
        Arc::new(objects::claim(name, &json!({"metadata": {"uid": uid}, "status": {"conditions": conditions}})))
    }

    fn described(changes: &[Change<NodeClaim>]) -> Vec<String> {
        let uid = |object: &Option<Arc<NodeClaim>>| {
            object.as_ref().and_then(|object| object.metadata.uid.clone()).unwrap_or_else(|| "-".into())
        };
        changes.iter().map(|change| format!("{} {}", uid(&change.old), uid(&change.new))).collect()
    }

    #[test]
    fn what_changed_appeared_and_went_is_followed() {
        let mut followed = Followed::default();
        let mut objects: BTreeMap<String, Arc<NodeClaim>> =
            ["a", "b", "c"].map(|name| (name.to_owned(), claim(name, name, &[]))).into();
        assert!(followed.changes(&objects).is_empty(), "what was before is not known");
        assert!(followed.changes(&objects).is_empty());
        objects.insert("a".into(), claim("a", "a", &[("True", "Ready")]));
        objects.insert("b".into(), claim("b", "other", &[]));
        objects.remove("c");
        objects.insert("d".into(), claim("d", "d", &[]));
        assert_eq!(described(&followed.changes(&objects)), ["a a", "b -", "- other", "- d", "c -"]);
        assert!(followed.changes(&objects).is_empty());
    }

    #[test]
    fn a_transition_is_another_status_or_a_new_condition() {
        let of = |old: Option<&NodeClaim>, new: &NodeClaim| -> Vec<(Option<String>, String)> {
            let all = transitions(old, new).into_iter();
            all.map(|one| (one.from.map(|from| from.status.to_owned()), one.to.status.to_owned())).collect()
        };
        let [none, unknown, launching, ready] =
            [&[][..], &[("Unknown", "Waiting")], &[("Unknown", "Launching")], &[("True", "Ready")]]
                .map(|ready| claim("a", "a", ready));
        assert_eq!(of(None, &unknown), [(None, "Unknown".into())]);
        assert_eq!(of(Some(&none), &unknown), [(None, "Unknown".into())]);
        assert_eq!(of(Some(&unknown), &launching), [], "another reason");
        assert_eq!(of(Some(&launching), &ready), [(Some("Unknown".into()), "True".into())]);
        assert_eq!(of(Some(&ready), &none), [], "removed");
    }

    #[test]
    fn a_kubelet_that_writes_many_conditions_gets_few_series() {
        let mut conditions: Vec<Value> =
            (0..10_000).map(|number| json!({"type": format!("T{number}"), "status": "True"})).collect();
        conditions.insert(0, json!({"type": "Long", "status": "True", "reason": "x".repeat(1_000)}));
        let node = objects::node("n", &json!({"status": {"conditions": conditions}}));
        let views = Conditioned::conditions(&node);
        assert_eq!((views.len(), views[0].kind), (MAX_CONDITIONS, "T0"));
    }

    #[test]
    fn a_node_has_its_conditions_also_without_reasons() {
        let node = objects::node("n", &json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}));
        let expected =
            ConditionView { kind: "Ready", status: "False", reason: "", message: "", since: UnixMillis::default() };
        assert_eq!(Conditioned::conditions(&node), [expected]);
    }
}
