//! Which client token a NodeClaim's next CreateFleet carries, and whether to look for an instance first.
//!
//! A crash between the call and the write must launch nothing twice, and neither may an answer that got lost. Two things hold
//! that: EC2 answers a token it knows with what it did before, and every instance carries its claim's UID as a tag, by which
//! it is found. The token is the claim's UID until EC2 has answered it without an instance, then `UID-1`, `UID-2` and so on;
//! nothing of that outlives the process, since after a restart the tag is looked up first. Time is an argument.

use std::collections::HashMap;

/// A claim that was made so shortly after this process began to lead may be another leader's, milliseconds: creation times are
/// whole seconds of the API server's clock.
const SKEW_MS: i64 = 10_000;
/// How long an instance that must be there may take to show itself before a new token is used, milliseconds.
const PATIENCE_MS: i64 = 60_000;
/// Claims are given up long before, so older attempts matter to nobody, milliseconds.
const MEMORY_MS: i64 = 3_600_000;

/// How to go about a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begin {
    /// Token of the call.
    pub token: String,
    /// Whether an instance of the claim may be there already.
    pub look_first: bool,
}

#[derive(Clone, Debug, Default)]
struct Attempt {
    /// Answers without an instance.
    answered: u32,
    /// Since when EC2 says that the token was used for something else.
    mismatch_ms: Option<i64>,
    touched_ms: i64,
}

/// The launches that did not come about yet, by UID.
#[derive(Clone, Debug)]
pub struct Attempts {
    leading_since_ms: i64,
    by_claim: HashMap<String, Attempt>,
}

impl Attempts {
    /// No attempts, by a process that leads since `now_ms`.
    pub fn new(now_ms: i64) -> Self {
        Self { leading_since_ms: now_ms, by_claim: HashMap::new() }
    }

    /// Begins an attempt for the claim `uid`, made at `created_ms`.
    pub fn begin(&mut self, uid: &str, created_ms: i64, now_ms: i64) -> Begin {
        let before = self.by_claim.contains_key(uid);
        self.by_claim.retain(|_, attempt| now_ms - attempt.touched_ms < MEMORY_MS);
        let attempt = self.by_claim.entry(uid.to_owned()).or_default();
        attempt.touched_ms = now_ms;
        let token = match attempt.answered {
            0 => uid.to_owned(),
            answered => format!("{uid}-{answered}"),
        };
        Begin { token, look_first: before || created_ms < self.leading_since_ms + SKEW_MS }
    }

    /// EC2 answered that it launched nothing: the next call is another one.
    pub fn nothing_launched(&mut self, uid: &str) {
        let attempt = self.by_claim.entry(uid.to_owned()).or_default();
        attempt.answered += 1;
        attempt.mismatch_ms = None;
    }

    /// EC2 says that the token was used before, with other parameters, and no instance shows. Returns true when it had time
    /// enough to: then the next token may be used.
    pub fn token_reused(&mut self, uid: &str, now_ms: i64) -> bool {
        let attempt = self.by_claim.entry(uid.to_owned()).or_default();
        let since = *attempt.mismatch_ms.get_or_insert(now_ms);
        if now_ms - since < PATIENCE_MS {
            return false;
        }
        attempt.answered += 1;
        attempt.mismatch_ms = None;
        true
    }

    /// The claim has its instance.
    pub fn launched(&mut self, uid: &str) {
        self.by_claim.remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_claim_is_launched_at_once_and_everything_else_is_looked_for_first() {
        let mut attempts = Attempts::new(100_000);
        let begin = |attempts: &mut Attempts, uid: &str, created| attempts.begin(uid, created, 200_000);
        assert_eq!(begin(&mut attempts, "new", 150_000), Begin { token: "new".into(), look_first: false });
        assert!(begin(&mut attempts, "new", 150_000).look_first, "a second attempt");
        assert!(begin(&mut attempts, "old", 90_000).look_first, "of another leader");
        assert!(begin(&mut attempts, "near", 105_000).look_first, "clocks differ");
        attempts.launched("new");
        assert!(!begin(&mut attempts, "new", 150_000).look_first);
    }

    #[test]
    fn the_token_changes_only_when_ec2_has_answered_it() {
        let mut attempts = Attempts::new(0);
        let token = |attempts: &mut Attempts| attempts.begin("uid", 50_000, 60_000).token;
        assert_eq!(token(&mut attempts), "uid");
        assert_eq!(token(&mut attempts), "uid", "no answer: the same call again");
        attempts.nothing_launched("uid");
        assert_eq!(token(&mut attempts), "uid-1");
        attempts.nothing_launched("uid");
        assert_eq!(token(&mut attempts), "uid-2");
    }

    #[test]
    fn a_token_of_another_call_is_given_up_after_a_minute_without_an_instance() {
        let mut attempts = Attempts::new(0);
        attempts.begin("uid", 50_000, 60_000);
        assert!(!attempts.token_reused("uid", 60_000));
        assert!(!attempts.token_reused("uid", 119_999));
        assert!(attempts.token_reused("uid", 120_000));
        assert_eq!(attempts.begin("uid", 50_000, 120_001).token, "uid-1");
        assert!(!attempts.token_reused("uid", 120_002), "the next one has its own minute");
    }

    #[test]
    fn old_attempts_are_forgotten() {
        let mut attempts = Attempts::new(0);
        attempts.begin("uid", 50_000, 60_000);
        attempts.begin("other", 50_000, 60_000 + MEMORY_MS);
        assert_eq!(attempts.by_claim.len(), 1);
    }
}
