//! Status conditions by the rules of Karpenter's objects (awslabs/operatorpkg): a condition's transition time moves only when
//! its status does, each condition records the generation it was evaluated on, and Ready is computed from its dependents.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

/// The root condition, computed from its dependents.
pub const READY: &str = "Ready";

/// NodePool: the spec is valid.
pub const VALIDATION_SUCCEEDED: &str = "ValidationSucceeded";
/// NodePool: its node class exists and is Ready.
pub const NODE_CLASS_READY: &str = "NodeClassReady";

/// NodePool: its nodes register. Ready does not depend on it.
pub const NODE_REGISTRATION_HEALTHY: &str = "NodeRegistrationHealthy";

/// NodeClaim: the instance is launched.
pub const LAUNCHED: &str = "Launched";
/// NodeClaim: the Node is registered.
pub const REGISTERED: &str = "Registered";
/// NodeClaim: the Node is initialized.
pub const INITIALIZED: &str = "Initialized";
/// NodeClaim: the drain of its node: Unknown while pods keep it, then True.
pub const DRAINED: &str = "Drained";
/// Reason of [`DRAINED`] while pods keep the node.
pub const DRAINING: &str = "Draining";
/// NodeClaim: the volumes of its drained node: Unknown while some are attached, then True, or False if they are not waited for any more.
pub const VOLUMES_DETACHED: &str = "VolumesDetached";
/// Reasons of [`VOLUMES_DETACHED`] when it is False.
pub const GRACE_PERIOD_ELAPSED: &str = "TerminationGracePeriodElapsed";
pub const DETACHMENT_TIMEOUT: &str = "DetachmentTimeout";
/// NodeClaim: its node is what was launched.
pub const CONSISTENT_STATE_FOUND: &str = "ConsistentStateFound";
/// Reason of [`CONSISTENT_STATE_FOUND`] when it is False.
pub const CONSISTENCY_CHECK_FAILED: &str = "ConsistencyCheckFailed";
/// EC2NodeClass: what its selectors and settings name exists.
pub const AMIS_READY: &str = "AMIsReady";
pub const CAPACITY_RESERVATIONS_READY: &str = "CapacityReservationsReady";
pub const INSTANCE_PROFILE_READY: &str = "InstanceProfileReady";
pub const PLACEMENT_GROUP_READY: &str = "PlacementGroupReady";
pub const SECURITY_GROUPS_READY: &str = "SecurityGroupsReady";
pub const SUBNETS_READY: &str = "SubnetsReady";
/// NodeClaim: the instance is shutting down.
pub const INSTANCE_TERMINATING: &str = "InstanceTerminating";
/// NodeClaim: it no longer matches its NodePool or node class.
pub const DRIFTED: &str = "Drifted";
/// NodeClaim: its node has been quiet for `consolidateAfter`.
pub const CONSOLIDATABLE: &str = "Consolidatable";
/// NodeClaim: its node is being disrupted; the reason is Underutilized, Empty, Drifted or Expired.
pub const DISRUPTION_REASON: &str = "DisruptionReason";

/// Dependents of Ready of a NodePool.
pub const NODE_POOL_DEPENDENTS: &[&str] = &[VALIDATION_SUCCEEDED, NODE_CLASS_READY];
/// Dependents of Ready of a NodeClaim.
pub const NODE_CLAIM_DEPENDENTS: &[&str] = &[LAUNCHED, REGISTERED, INITIALIZED];
/// Dependents of Ready of an EC2NodeClass.
pub const EC2_NODE_CLASS_DEPENDENTS: &[&str] = &[
    AMIS_READY,
    CAPACITY_RESERVATIONS_READY,
    INSTANCE_PROFILE_READY,
    PLACEMENT_GROUP_READY,
    SECURITY_GROUPS_READY,
    SUBNETS_READY,
    VALIDATION_SUCCEEDED,
];
/// Conditions of an EC2NodeClass that its validation waits for.
pub const BEFORE_VALIDATION: [&str; 4] = [AMIS_READY, INSTANCE_PROFILE_READY, SECURITY_GROUPS_READY, SUBNETS_READY];

/// Maximum length of a message that the API server accepts, in characters.
const MAX_MESSAGE: usize = 32_768;

/// Status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// `True`.
    True,
    /// `False`.
    False,
    /// `Unknown`.
    Unknown,
}

impl Status {
    /// The value of `status` in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// The condition of this type, if present.
pub fn get<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// Whether the condition exists and is True.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    get(conditions, type_).is_some_and(|condition| condition.status == Status::True.as_str())
}

/// The conditions of one object during an evaluation.
#[derive(Debug)]
pub struct Conditions<'a> {
    list: &'a mut Vec<Condition>,
    dependents: &'a [&'a str],
    generation: Option<i64>,
    now: Time,
}

impl<'a> Conditions<'a> {
    /// Starts an evaluation of the conditions in `list`, which belong to an object of this `generation`. Dependents of Ready that
    /// were never evaluated become Unknown since `created`.
    pub fn open(
        list: &'a mut Vec<Condition>,
        dependents: &'a [&'a str],
        generation: Option<i64>,
        created: Option<&Time>,
        now: &Time,
    ) -> Self {
        let now = whole_seconds(now);
        let since = created.map_or_else(|| now.clone(), whole_seconds);
        let mut conditions = Self { list, dependents, generation, now };
        for type_ in dependents {
            if get(conditions.list, type_).is_none() {
                conditions.list.push(Condition {
                    type_: (*type_).to_owned(),
                    status: Status::Unknown.as_str().into(),
                    reason: "AwaitingReconciliation".into(),
                    message: "object is awaiting reconciliation".into(),
                    last_transition_time: since.clone(),
                    observed_generation: generation,
                });
            }
        }
        if get(conditions.list, READY).is_none() {
            conditions.write(READY, Status::Unknown, "AwaitingReconciliation", "object is awaiting reconciliation");
            if let Some(ready) = conditions.list.iter_mut().find(|condition| condition.type_ == READY) {
                ready.last_transition_time = since;
            }
        }
        conditions.compute_ready();
        conditions
    }

    /// Sets a condition. An empty `reason` becomes the type's name.
    /// Returns whether anything but the observed generation changed.
    pub fn set(&mut self, type_: &str, status: Status, reason: &str, message: &str) -> bool {
        let changed = self.write(type_, status, reason, message);
        self.compute_ready();
        changed
    }

    /// Sets a condition True; the reason is the type's name.
    pub fn set_true(&mut self, type_: &str) -> bool {
        self.set(type_, Status::True, type_, "")
    }

    /// Sets a condition False.
    pub fn set_false(&mut self, type_: &str, reason: &str, message: &str) -> bool {
        self.set(type_, Status::False, reason, message)
    }

    /// Sets a condition Unknown.
    pub fn set_unknown(&mut self, type_: &str, reason: &str, message: &str) -> bool {
        self.set(type_, Status::Unknown, reason, message)
    }

    /// Removes a condition, unless it is Ready or a dependent of Ready. Returns whether it was removed.
    pub fn clear(&mut self, type_: &str) -> bool {
        if type_ == READY || self.dependents.contains(&type_) {
            return false;
        }
        let before = self.list.len();
        self.list.retain(|condition| condition.type_ != type_);
        self.list.len() != before
    }

    /// The condition of this type, if present.
    pub fn get(&self, type_: &str) -> Option<&Condition> {
        get(self.list, type_)
    }

    fn is_current(&self, condition: &Condition, status: Status) -> bool {
        condition.status == status.as_str() && condition.observed_generation == self.generation
    }

    fn write(&mut self, type_: &str, status: Status, reason: &str, message: &str) -> bool {
        let reason = if reason.is_empty() { type_ } else { reason };
        let message: String = message.chars().take(MAX_MESSAGE).collect();
        let Some(condition) = self.list.iter_mut().find(|condition| condition.type_ == type_) else {
            // Ready stays last, as in Karpenter.
            let at = self.list.iter().position(|condition| condition.type_ == READY).unwrap_or(self.list.len());
            self.list.insert(
                at,
                Condition {
                    type_: type_.to_owned(),
                    status: status.as_str().into(),
                    reason: reason.to_owned(),
                    message,
                    last_transition_time: self.now.clone(),
                    observed_generation: self.generation,
                },
            );
            return true;
        };
        condition.observed_generation = self.generation;
        if condition.status != status.as_str() {
            condition.last_transition_time = self.now.clone();
        } else if condition.reason == reason && condition.message == message {
            return false;
        }
        condition.status = status.as_str().into();
        reason.clone_into(&mut condition.reason);
        condition.message = message;
        true
    }

    fn compute_ready(&mut self) {
        let unless = |status: Status| -> Vec<String> {
            self.dependents
                .iter()
                .filter_map(|type_| self.get(type_))
                .filter(|condition| !self.is_current(condition, status))
                .map(|condition| format!("{}={}", condition.type_, condition.status))
                .collect()
        };
        let unhealthy: Vec<String> = self
            .dependents
            .iter()
            .filter_map(|type_| self.get(type_))
            .filter(|condition| self.is_current(condition, Status::False))
            .map(|condition| format!("{}=False", condition.type_))
            .collect();
        let pending = unless(Status::True);
        if !unhealthy.is_empty() {
            self.write(READY, Status::False, "UnhealthyDependents", &unhealthy.join(", "));
        } else if pending.is_empty() {
            self.write(READY, Status::True, READY, "");
        } else {
            self.write(READY, Status::Unknown, "ReconcilingDependents", &pending.join(", "));
        }
    }
}

/// The time as the API server returns it, in whole seconds.
fn whole_seconds(time: &Time) -> Time {
    Time(Timestamp::from_second(time.0.as_second()).unwrap_or(time.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    fn open(list: &mut Vec<Condition>, generation: i64, now: i64) -> Conditions<'_> {
        Conditions::open(list, NODE_POOL_DEPENDENTS, Some(generation), Some(&at(1)), &at(now))
    }

    fn ready(list: &[Condition]) -> (String, String, String) {
        let ready = get(list, READY).unwrap();
        (ready.status.clone(), ready.reason.clone(), ready.message.clone())
    }

    #[test]
    fn unevaluated_conditions_are_unknown_since_creation() {
        let mut list = vec![];
        open(&mut list, 1, 10);
        let types: Vec<_> = list.iter().map(|condition| condition.type_.as_str()).collect();
        assert_eq!(types, [VALIDATION_SUCCEEDED, NODE_CLASS_READY, READY]);
        for condition in &list {
            assert_eq!((condition.status.as_str(), &condition.last_transition_time), ("Unknown", &at(1)));
        }
        assert_eq!(list[0].reason, "AwaitingReconciliation");
    }

    #[test]
    fn the_transition_time_moves_only_with_the_status() {
        let mut list = vec![];
        assert!(open(&mut list, 1, 10).set_true(VALIDATION_SUCCEEDED));
        assert_eq!(list[0].last_transition_time, at(10));
        assert_eq!(list[0].reason, VALIDATION_SUCCEEDED);
        assert!(!open(&mut list, 2, 20).set_true(VALIDATION_SUCCEEDED));
        assert_eq!((&list[0].last_transition_time, list[0].observed_generation), (&at(10), Some(2)));
        assert!(open(&mut list, 2, 30).set(VALIDATION_SUCCEEDED, Status::True, "Other", "message"));
        assert_eq!(list[0].last_transition_time, at(10));
        assert!(open(&mut list, 2, 40).set_false(VALIDATION_SUCCEEDED, "NodePoolValidationFailed", "no"));
        assert_eq!(list[0].last_transition_time, at(40));
    }

    #[test]
    fn ready_is_computed_from_its_dependents() {
        let mut list = vec![];
        let mut conditions = open(&mut list, 1, 10);
        conditions.set_true(VALIDATION_SUCCEEDED);
        assert_eq!(ready(&list), ("Unknown".into(), "ReconcilingDependents".into(), "NodeClassReady=Unknown".into()));
        open(&mut list, 1, 20).set_true(NODE_CLASS_READY);
        assert_eq!(ready(&list), ("True".into(), "Ready".into(), String::new()));
        assert_eq!(get(&list, READY).unwrap().last_transition_time, at(20));
        open(&mut list, 1, 30).set_false(NODE_CLASS_READY, "NodeClassNotFound", "it is missing");
        assert_eq!(ready(&list), ("False".into(), "UnhealthyDependents".into(), "NodeClassReady=False".into()));
    }

    #[test]
    fn a_condition_of_an_older_generation_leaves_ready_unknown() {
        let mut list = vec![];
        let mut conditions = open(&mut list, 1, 10);
        conditions.set_true(VALIDATION_SUCCEEDED);
        conditions.set_true(NODE_CLASS_READY);
        let mut conditions = open(&mut list, 2, 20);
        conditions.set_true(VALIDATION_SUCCEEDED);
        assert_eq!(ready(&list).0, "Unknown");
        open(&mut list, 2, 30).set_true(NODE_CLASS_READY);
        assert_eq!(ready(&list).0, "True");
    }

    #[test]
    fn an_independent_condition_leaves_ready_unchanged_and_can_be_cleared() {
        let mut list = vec![];
        let mut conditions = open(&mut list, 1, 10);
        conditions.set_true(VALIDATION_SUCCEEDED);
        conditions.set_true(NODE_CLASS_READY);
        conditions.set_false("NodeRegistrationHealthy", "RegistrationFailed", "");
        assert!(is_true(conditions.list, READY));
        assert_eq!(conditions.list.last().map(|condition| condition.type_.as_str()), Some(READY));
        assert!(conditions.clear("NodeRegistrationHealthy"));
        assert!(!conditions.clear("NodeRegistrationHealthy"));
        assert!(!conditions.clear(VALIDATION_SUCCEEDED));
        assert!(!conditions.clear(READY));
        assert_eq!(list.len(), 3);
    }
}
