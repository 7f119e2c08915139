//! Idempotency of the calls of a launch group: the token of the next CreateFleet call, whether to search for instances first, and
//! which instances are unassigned. Pure.
//!
//! Neither a crash between the call and the write of its result nor a lost response may launch twice:
//! - Every instance carries its launch group as a tag, and serves any claim of the group. An instance that no claim names is
//!   assigned to the first claim that needs one.
//! - A call without a response is repeated unchanged before any other call. EC2 returns the original result for a known token.
//! - A throttled call launched nothing: the next call uses the same token for what is needed and available by then.
//! - After a restart, which loses that call, instances are searched by tag first. If the search does not show them yet,
//!   EC2 rejects the reused token until they are described.
//!
//! The token is the id of the launch group until EC2 has responded, then `id-1`, `id-2` and so on.

use std::collections::BTreeSet;
use std::time::Duration;

use stowage_model::time::UnixMillis;

use crate::Instance;

/// Claims created this long after the process began to lead may still belong to the previous leader: creation times are whole
/// seconds of the clock of the API server.
const SKEW: Duration = Duration::from_secs(10);
/// How long to wait for the instances of a reused token before the next token is used: EC2 may describe new instances 90 s late.
const REUSED_TOKEN_TIMEOUT: Duration = Duration::from_secs(100);

/// Consecutive calls that EC2 fails to process before their offerings count as unavailable. Each call is attempted ten times.
const MAX_SERVER_FAULTS: u32 = 2;

/// The calls of a launch group and their instances.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    /// Calls with a response of EC2.
    responded: u32,
    /// Since when EC2 rejects a token as reused with other parameters.
    token_reused_since: Option<UnixMillis>,
    /// Consecutive calls that EC2 failed to process.
    server_faults: u32,
    /// Whether a call was abandoned whose effect is unknown: its instances may still appear.
    abandoned: bool,
    /// Ids of all instances seen so far.
    known: BTreeSet<String>,
    unassigned: Vec<Instance>,
}

impl Attempts {
    /// Whether instances may exist that this process does not know, for claims created at `created`.
    pub fn must_search(&self, is_response_missing: bool, created: UnixMillis, leading_since: UnixMillis) -> bool {
        let inherited = self.responded == 0 && created < leading_since + SKEW;
        is_response_missing || inherited || self.abandoned || self.token_reused_since.is_some()
    }

    /// The token of the next call.
    pub fn token(&self, launch_group: &str) -> String {
        match self.responded {
            0 => launch_group.to_owned(),
            responded => format!("{launch_group}-{responded}"),
        }
    }

    /// Records that EC2 responded to a call, so that the next call uses the next token.
    pub fn responded(&mut self) {
        self.responded += 1;
        self.server_faults = 0;
    }

    /// Records that EC2 failed to process a call. Returns whether it fails repeatedly, so that the call is abandoned: the next call
    /// uses the next token.
    pub fn server_fault(&mut self) -> bool {
        self.server_faults += 1;
        let repeated = self.server_faults >= MAX_SERVER_FAULTS;
        if repeated {
            self.responded();
            self.abandoned = true;
        }
        repeated
    }

    /// Records that EC2 rejected the token as used with other parameters, and no instance is described. Returns whether the wait
    /// has timed out, so that the next token is used. Only an earlier process can have used the tokens, so the timeout applies
    /// once to all of them.
    pub fn token_reused(&mut self, now: UnixMillis) -> bool {
        let since = *self.token_reused_since.get_or_insert(now);
        let expired = since.is_older_than(REUSED_TOKEN_TIMEOUT, now);
        self.responded += u32::from(expired);
        expired
    }

    /// Adds instances of the launch group from a response or a search. Instances whose provider id is in `named` are already
    /// assigned. Returns how many new instances are unassigned.
    pub fn found(&mut self, instances: impl IntoIterator<Item = Instance>, named: &BTreeSet<String>) -> usize {
        let before = self.unassigned.len();
        for instance in instances {
            if self.known.insert(instance.id.clone()) && !named.contains(&instance.provider_id) {
                self.unassigned.push(instance);
            }
        }
        self.unassigned.len() - before
    }

    /// The next unassigned instance.
    pub fn assign(&mut self) -> Option<Instance> {
        (!self.unassigned.is_empty()).then(|| self.unassigned.remove(0))
    }

    /// The number of known instances of the launch group, assigned or not.
    pub fn seen(&self) -> usize {
        self.known.len()
    }
}

#[cfg(test)]
mod tests {
    use stowage_model::offering::CapacityType;

    use super::*;
    use crate::InstanceState;

    fn instance(id: &str) -> Instance {
        Instance {
            id: id.into(),
            provider_id: format!("aws:///z/{id}"),
            client_token: "group".into(),
            node_claim: String::new(),
            instance_type: "m5.large".into(),
            zone: "z".into(),
            capacity_type: CapacityType::OnDemand,
            reservation: None,
            partition: None,
            image_id: "ami-1".into(),
            launched_at: UnixMillis(0),
            state: InstanceState::Pending,
        }
    }

    #[test]
    fn a_new_launch_group_is_not_searched_and_an_inherited_group_is() {
        let mut attempts = Attempts::default();
        assert!(!attempts.must_search(false, UnixMillis(150_000), UnixMillis(100_000)));
        assert!(
            attempts.must_search(false, UnixMillis(90_000), UnixMillis(100_000)),
            "possibly created by the previous leader"
        );
        assert!(
            attempts.must_search(false, UnixMillis(105_000), UnixMillis(100_000)),
            "within the tolerance for clock skew"
        );
        assert!(attempts.must_search(true, UnixMillis(150_000), UnixMillis(100_000)), "a call has no response");
        attempts.responded();
        assert!(!attempts.must_search(false, UnixMillis(90_000), UnixMillis(100_000)), "already searched");
    }

    #[test]
    fn the_token_changes_only_after_a_response() {
        let mut attempts = Attempts::default();
        assert_eq!((attempts.token("g"), attempts.token("g")), ("g".into(), "g".into()));
        attempts.responded();
        assert_eq!(attempts.token("g"), "g-1");
        attempts.responded();
        assert_eq!(attempts.token("g"), "g-2");
    }

    #[test]
    fn a_reused_token_times_out_after_the_lag_of_descriptions_and_later_tokens_at_once() {
        let mut attempts = Attempts::default();
        assert!(!attempts.token_reused(UnixMillis(60_000)));
        assert!(!attempts.token_reused(UnixMillis(159_999)));
        assert!(attempts.token_reused(UnixMillis(160_000)));
        assert_eq!(attempts.token("g"), "g-1");
        assert!(attempts.token_reused(UnixMillis(160_100)), "used by the same earlier process");
        assert!(attempts.must_search(false, UnixMillis(999_000), UnixMillis(0)), "its instances may still appear");
    }

    #[test]
    fn a_call_that_ec2_fails_to_process_twice_is_abandoned() {
        let mut attempts = Attempts::default();
        assert!(!attempts.server_fault());
        attempts.responded();
        assert!(!attempts.server_fault(), "the first fault since a response");
        assert_eq!(attempts.token("g"), "g-1", "repeated with the same token");
        assert!(!attempts.must_search(false, UnixMillis(999_000), UnixMillis(0)));
        assert!(attempts.server_fault());
        assert_eq!(attempts.token("g"), "g-2");
        assert!(attempts.must_search(false, UnixMillis(999_000), UnixMillis(0)));
    }

    #[test]
    fn an_instance_is_assigned_to_one_claim_and_never_when_a_claim_names_it() {
        let mut attempts = Attempts::default();
        let named = BTreeSet::from(["aws:///z/i-2".to_owned()]);
        assert_eq!(attempts.found([instance("i-1"), instance("i-2")], &named), 1);
        assert_eq!(attempts.assign().map(|instance| instance.id), Some("i-1".into()));
        assert_eq!(attempts.assign(), None);
        assert_eq!(attempts.found([instance("i-1"), instance("i-2"), instance("i-3")], &named), 1, "seen again");
        assert_eq!(attempts.assign().map(|instance| instance.id), Some("i-3".into()));
        assert_eq!(attempts.seen(), 3);
    }
}
