//! The calls of a launch group: which token the next CreateFleet carries, whether to look for instances first, and whose they
//! are. Pure.
//!
//! A crash between the call and the write must launch nothing twice, and neither may an answer that got lost. Three things hold
//! that. Every instance carries its group's name as a tag, and any of them serves any of the group's claims, so that one that no
//! claim names yet is given to the first that wants one. A call that was not answered is made again as it was, before any other,
//! and EC2 answers a token it knows with what it did before. And after a restart, where that call is forgotten, the tag is looked
//! up first; EC2 then refuses the token of a call that the look-up did not show yet, until its instances show themselves. The
//! token is the group's name until EC2 has answered it, then `name-1`, `name-2` and so on.

use std::collections::BTreeSet;

use crate::cloud::Instance;

/// A claim that was made so shortly after this process began to lead may be another leader's, milliseconds: creation times are
/// whole seconds of the API server's clock.
const SKEW_MS: i64 = 10_000;
/// How long an instance that must be there may take to show itself before a new token is used, milliseconds.
const PATIENCE_MS: i64 = 60_000;

/// What is known of a group's calls.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    /// Calls that EC2 has answered.
    answered: u32,
    /// Since when EC2 says that a token was used for something else.
    mismatch_ms: Option<i64>,
    /// Ids of the instances that were seen or given away.
    known: BTreeSet<String>,
    /// Instances that no claim has yet.
    spare: Vec<Instance>,
}

impl Attempts {
    /// Whether instances may be there that this process does not know of, for claims made at `created_ms`.
    pub fn must_look(&self, unanswered: bool, created_ms: i64, leading_since_ms: i64) -> bool {
        let inherited = self.answered == 0 && created_ms < leading_since_ms + SKEW_MS;
        unanswered || inherited || self.mismatch_ms.is_some()
    }

    /// The token of the group's next call.
    pub fn token(&self, group: &str) -> String {
        match self.answered {
            0 => group.to_owned(),
            answered => format!("{group}-{answered}"),
        }
    }

    /// EC2 answered a call: the next one is another.
    pub fn answered(&mut self) {
        self.answered += 1;
    }

    /// EC2 says that the token was used before, with other parameters, and no instance shows. Returns true when it had time
    /// enough to: then the next token may be used. Only an earlier process can have used it, so what one token has waited need
    /// not be waited again for the next.
    pub fn token_reused(&mut self, now_ms: i64) -> bool {
        let since = *self.mismatch_ms.get_or_insert(now_ms);
        let over = now_ms - since >= PATIENCE_MS;
        self.answered += u32::from(over);
        over
    }

    /// Takes in instances of the group, of an answer or a look-up; those that a claim names already, `named` by their provider
    /// ids, are nobody else's. Returns how many are new.
    pub fn found(&mut self, instances: impl IntoIterator<Item = Instance>, named: &BTreeSet<String>) -> usize {
        let before = self.spare.len();
        for instance in instances {
            if self.known.insert(instance.id.clone()) && !named.contains(&instance.provider_id) {
                self.spare.push(instance);
            }
        }
        self.spare.len() - before
    }

    /// An instance for a claim.
    pub fn give(&mut self) -> Option<Instance> {
        (!self.spare.is_empty()).then(|| self.spare.remove(0))
    }

    /// How many instances of the group are somebody's or nobody's yet, as far as is known.
    pub fn seen(&self) -> usize {
        self.known.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::InstanceState;
    use crate::model::offering::CapacityType;
    use crate::model::time::UnixMillis;

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
    fn a_fresh_group_is_launched_at_once_and_what_may_be_there_is_looked_for_first() {
        let mut attempts = Attempts::default();
        assert!(!attempts.must_look(false, 150_000, 100_000));
        assert!(attempts.must_look(false, 90_000, 100_000), "of another leader");
        assert!(attempts.must_look(false, 105_000, 100_000), "clocks differ");
        assert!(attempts.must_look(true, 150_000, 100_000), "an answer is missing");
        attempts.answered();
        assert!(!attempts.must_look(false, 90_000, 100_000), "it has been looked for");
    }

    #[test]
    fn the_token_changes_only_when_ec2_has_answered_it() {
        let mut attempts = Attempts::default();
        assert_eq!((attempts.token("g"), attempts.token("g")), ("g".into(), "g".into()));
        attempts.answered();
        assert_eq!(attempts.token("g"), "g-1");
        attempts.answered();
        assert_eq!(attempts.token("g"), "g-2");
    }

    #[test]
    fn a_token_of_another_call_is_given_up_after_a_minute_without_an_instance_and_those_after_it_at_once() {
        let mut attempts = Attempts::default();
        assert!(!attempts.token_reused(60_000));
        assert!(!attempts.token_reused(119_999));
        assert!(attempts.token_reused(120_000));
        assert_eq!(attempts.token("g"), "g-1");
        assert!(attempts.token_reused(120_100), "of the same earlier process");
        assert!(attempts.must_look(false, 999_000, 0), "it may still show itself");
    }

    #[test]
    fn an_instance_is_given_to_one_claim_and_never_one_that_is_somebodys() {
        let mut attempts = Attempts::default();
        let named = BTreeSet::from(["aws:///z/i-2".to_owned()]);
        assert_eq!(attempts.found([instance("i-1"), instance("i-2")], &named), 1);
        assert_eq!(attempts.give().map(|instance| instance.id), Some("i-1".into()));
        assert_eq!(attempts.give(), None);
        assert_eq!(attempts.found([instance("i-1"), instance("i-2"), instance("i-3")], &named), 1, "seen again");
        assert_eq!(attempts.give().map(|instance| instance.id), Some("i-3".into()));
        assert_eq!(attempts.seen(), 3);
    }
}
