//! Claims of a launch group that wait for one call.
//!
//! The first that comes makes the call, on behalf of all that come within a short window; then the others find their answers. A
//! group's calls follow each other, so that what one of them left unanswered is settled before the next.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::cloud::ec2::launch::idempotency::Attempts;
use crate::cloud::launch_group::MOST;
use crate::cloud::{LaunchError, Launched};
use crate::sync::lock;

/// The window closes when all have come, or nobody did for so long. Longer than the 35 ms of Karpenter, which can't know whether
/// anybody else will come: who is alone waits for nobody here.
const IDLE: Duration = Duration::from_millis(200);
/// The window is open for so long at most.
const LONGEST: Duration = Duration::from_secs(1);
/// Claims are given up long before, so older groups matter to nobody, milliseconds.
const MEMORY_MS: i64 = 3_600_000;

/// What became of a claim.
pub type Answer = Result<Launched, LaunchError>;

/// The launch groups with claims that are being launched. `C` is a call.
#[derive(Debug)]
pub struct Batches<C> {
    groups: Mutex<HashMap<String, Arc<Batch<C>>>>,
}

/// A launch group.
#[derive(Debug)]
pub struct Batch<C> {
    turn: tokio::sync::Mutex<Turn<C>>,
    /// UIDs of the claims that wait, in the order they came.
    waiting: Mutex<Vec<String>>,
    came: Notify,
    touched_ms: AtomicI64,
}

/// What the one who makes a group's calls works with.
#[derive(Debug)]
pub struct Turn<C> {
    /// Tokens and instances.
    pub attempts: Attempts,
    /// The call that EC2 may have heard and did not answer.
    pub unanswered: Option<C>,
    answers: HashMap<String, Answer>,
}

/// A claim's place among those that wait; left when dropped.
#[derive(Debug)]
pub struct Place<'a, C> {
    batch: &'a Batch<C>,
    uid: &'a str,
}

impl<C> Default for Batches<C> {
    fn default() -> Self {
        Self { groups: Mutex::default() }
    }
}

impl<C> Batches<C> {
    /// The group of a name.
    pub fn of(&self, group: &str, now_ms: i64) -> Arc<Batch<C>> {
        let mut groups = lock(&self.groups);
        groups.retain(|_, batch| {
            Arc::strong_count(batch) > 1 || now_ms - batch.touched_ms.load(Ordering::Relaxed) < MEMORY_MS
        });
        let batch = groups.entry(group.to_owned()).or_insert_with(|| {
            let turn = Turn { attempts: Attempts::default(), unanswered: None, answers: HashMap::new() };
            let (waiting, came) = (Mutex::default(), Notify::new());
            Arc::new(Batch { turn: tokio::sync::Mutex::new(turn), waiting, came, touched_ms: AtomicI64::new(now_ms) })
        });
        batch.touched_ms.store(now_ms, Ordering::Relaxed);
        Arc::clone(batch)
    }
}

impl<C> Batch<C> {
    /// Waits with the others.
    pub fn join<'a>(&'a self, uid: &'a str) -> Place<'a, C> {
        lock(&self.waiting).push(uid.to_owned());
        self.came.notify_one();
        Place { batch: self, uid }
    }

    /// Waits until it is this claim's turn to make calls, or to find its answer.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, Turn<C>> {
        self.turn.lock().await
    }

    /// The claims to make a call for: `expected` of them, or those that came until the window closed.
    pub async fn gather(&self, turn: &Turn<C>, expected: usize) -> Vec<String> {
        let end = Instant::now() + LONGEST;
        loop {
            let came = self.came.notified();
            let without = |uid: &&String| !turn.answers.contains_key(*uid);
            let ready: Vec<String> = lock(&self.waiting).iter().filter(without).take(MOST).cloned().collect();
            if ready.len() >= expected.min(MOST) {
                return ready;
            }
            if tokio::time::timeout_at(end.min(Instant::now() + IDLE), came).await.is_err() {
                return ready;
            }
        }
    }
}

impl<C> Turn<C> {
    /// The answer that somebody got for a claim. An instance stays the claim's, should it ask again.
    pub fn take(&mut self, uid: &str) -> Option<Answer> {
        match self.answers.get(uid) {
            Some(Ok(launched)) => Some(Ok(launched.clone())),
            Some(Err(_)) => self.answers.remove(uid),
            None => None,
        }
    }

    /// Answers a claim.
    pub fn answer(&mut self, uid: String, answer: Answer) {
        self.answers.insert(uid, answer);
    }

    /// Tells a claim of a failure, unless it was answered.
    pub fn answer_unless(&mut self, uid: String, error: &LaunchError) {
        self.answers.entry(uid).or_insert_with(|| Err(error.clone()));
    }
}

impl<C> Drop for Place<'_, C> {
    fn drop(&mut self) {
        let mut waiting = lock(&self.batch.waiting);
        if let Some(index) = waiting.iter().position(|uid| uid == self.uid) {
            waiting.remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> Answer {
        Err(LaunchError::Throttled)
    }

    /// Asks as a launch does; returns for how many the call was made, where this claim made it.
    async fn ask(batches: &Batches<()>, uid: &str, expected: usize) -> Option<usize> {
        let batch = batches.of("group", 0);
        let _place = batch.join(uid);
        let mut turn = batch.turn().await;
        if turn.take(uid).is_some() {
            return None;
        }
        let members = batch.gather(&turn, expected).await;
        let count = members.len();
        for member in members {
            turn.answer(member, refused());
        }
        turn.take(uid).map(|_| count)
    }

    #[tokio::test]
    async fn one_call_is_made_for_all_and_as_soon_as_all_are_there() {
        let batches = Batches::default();
        let begin = Instant::now();
        let uids: Vec<String> = (0..200).map(|number| number.to_string()).collect();
        let calls = futures::future::join_all(uids.iter().map(|uid| ask(&batches, uid, 200))).await;
        assert_eq!(calls.into_iter().flatten().collect::<Vec<_>>(), [200]);
        assert!(begin.elapsed() < IDLE, "nobody else was waited for: {:?}", begin.elapsed());
    }

    #[tokio::test]
    async fn those_that_do_not_come_are_not_waited_for_long() {
        let batches = Batches::default();
        let begin = Instant::now();
        let calls = futures::future::join(ask(&batches, "a", 3), ask(&batches, "b", 3)).await;
        assert_eq!(calls, (Some(2), None));
        assert!(begin.elapsed() >= IDLE && begin.elapsed() < LONGEST, "{:?}", begin.elapsed());
        assert_eq!(ask(&batches, "a", 1).await, Some(1), "a failure is told once, then it is tried anew");
    }

    #[tokio::test]
    async fn who_gives_up_waiting_leaves_his_place_and_the_turn_to_the_next() {
        let batches = Batches::default();
        let early = tokio::time::timeout(Duration::from_millis(1), ask(&batches, "a", 3)).await;
        assert!(early.is_err());
        assert_eq!(ask(&batches, "b", 1).await, Some(1));
    }

    #[tokio::test]
    async fn groups_that_nobody_asked_for_in_a_long_time_are_forgotten() {
        let batches: Batches<()> = Batches::default();
        drop(batches.of("old", 0));
        let held = batches.of("held", 0);
        drop(batches.of("new", MEMORY_MS));
        assert_eq!(lock(&batches.groups).len(), 2);
        drop(held);
    }
}
