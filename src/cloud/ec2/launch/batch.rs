//! Batches the claims of a launch group into one call.
//!
//! The first claim makes the calls on behalf of all claims that arrive within a short window; the others receive their answers as
//! instances come. The calls of a launch group are serialized, so that a call without a response is resolved before the next call.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stowage_api::launch_group::MAX_SIZE;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::ec2::launch::idempotency::Attempts;
use crate::{LaunchError, Launched};

/// The window closes when all claims have arrived, or none has for this long. Longer than the 35 ms of Karpenter, which does not
/// know how many claims to expect; here a single claim does not wait.
const IDLE: Duration = Duration::from_millis(200);
/// Maximum length of the window.
const MAX_WINDOW: Duration = Duration::from_secs(1);
/// How long an unused batch is kept: launches time out long before.
const MEMORY: Duration = Duration::from_hours(1);

/// The result for one claim.
pub type Answer = Result<Launched, LaunchError>;

/// The batches by launch group. `C` is a call.
#[derive(Debug)]
pub struct LaunchBatches<C> {
    by_launch_group: Mutex<HashMap<String, Arc<LaunchBatch<C>>>>,
}

/// The batch of one launch group.
#[derive(Debug)]
pub struct LaunchBatch<C> {
    /// Held while calls are made; locked before `waiting` and `answers`.
    state: tokio::sync::Mutex<BatchState<C>>,
    answers: Mutex<HashMap<String, Answer>>,
    answered: Notify,
    /// UIDs of the waiting claims, in order of arrival.
    waiting: Mutex<Vec<String>>,
    arrived: Notify,
    /// [`UnixMillis`] of the last use.
    used_at: AtomicI64,
}

/// What a waiting claim gets.
#[derive(Debug)]
pub enum Turn<'a, C> {
    /// Another claim's call answered it.
    Answered(Box<Answer>),
    /// Exclusive access to the calls of the launch group.
    Call(tokio::sync::MutexGuard<'a, BatchState<C>>),
}

/// The calls of a launch group so far.
#[derive(Debug)]
pub struct BatchState<C> {
    /// Tokens and instances.
    pub attempts: Attempts,
    /// The call that EC2 may have received, without a response.
    pub without_response: Option<C>,
}

/// The queue entry of a waiting claim; removed on drop.
#[derive(Debug)]
pub struct QueueTicket<'a, C> {
    batch: &'a LaunchBatch<C>,
    uid: &'a str,
}

impl<C> Default for LaunchBatches<C> {
    fn default() -> Self {
        Self { by_launch_group: Mutex::default() }
    }
}

impl<C> LaunchBatches<C> {
    /// The batch of a launch group.
    pub fn of(&self, launch_group: &str, now: UnixMillis) -> Arc<LaunchBatch<C>> {
        let mut batches = lock(&self.by_launch_group);
        batches.retain(|_, batch| {
            let used_at = UnixMillis(batch.used_at.load(Ordering::Relaxed));
            Arc::strong_count(batch) > 1 || !used_at.is_older_than(MEMORY, now)
        });
        let batch = batches.entry(launch_group.to_owned()).or_insert_with(|| {
            let state = BatchState { attempts: Attempts::default(), without_response: None };
            let (waiting, arrived) = (Mutex::default(), Notify::new());
            let (answers, answered) = (Mutex::default(), Notify::new());
            let (state, used_at) = (tokio::sync::Mutex::new(state), AtomicI64::new(now.0));
            Arc::new(LaunchBatch { state, answers, answered, waiting, arrived, used_at })
        });
        batch.used_at.store(now.0, Ordering::Relaxed);
        Arc::clone(batch)
    }
}

impl<C> LaunchBatch<C> {
    /// Adds a claim to the queue.
    pub fn join<'a>(&'a self, uid: &'a str) -> QueueTicket<'a, C> {
        lock(&self.waiting).push(uid.to_owned());
        self.arrived.notify_one();
        QueueTicket { batch: self, uid }
    }

    /// Waits until a claim is answered or has exclusive access.
    pub async fn turn(&self, uid: &str) -> Turn<'_, C> {
        let mut access = pin!(self.state.lock());
        loop {
            let mut answered = pin!(self.answered.notified());
            // Registered before the answers are read, so that no answer is missed.
            answered.as_mut().enable();
            if let Some(answer) = self.take(uid) {
                return Turn::Answered(Box::new(answer));
            }
            tokio::select! {
                guard = &mut access => return match self.take(uid) {
                    Some(answer) => Turn::Answered(Box::new(answer)),
                    None => Turn::Call(guard),
                },
                () = answered => {}
            }
        }
    }

    /// The answer for a claim. An instance stays assigned to the claim, so that a repeated request gets the same answer; an error
    /// is returned once.
    pub fn take(&self, uid: &str) -> Option<Answer> {
        let mut answers = lock(&self.answers);
        match answers.get(uid) {
            Some(Ok(launched)) => Some(Ok(launched.clone())),
            Some(Err(_)) => answers.remove(uid),
            None => None,
        }
    }

    /// Answers claims that wait.
    pub fn answer(&self, new: impl IntoIterator<Item = (String, Answer)>) {
        lock(&self.answers).extend(new);
        self.answered.notify_waiters();
    }

    /// Answers claims with an error, except those that have an instance.
    pub fn answer_rest(&self, uids: Vec<String>, error: &LaunchError) {
        let mut answers = lock(&self.answers);
        for uid in uids {
            answers.entry(uid).or_insert_with(|| Err(error.clone()));
        }
        drop(answers);
        self.answered.notify_waiters();
    }

    /// The claims to make a call for: `expected` claims, or the claims that arrived before the window closed.
    pub async fn gather(&self, expected: usize) -> Vec<String> {
        let end = Instant::now() + MAX_WINDOW;
        loop {
            let arrived = self.arrived.notified();
            let ready: Vec<String> = {
                let (waiting, answers) = (lock(&self.waiting), lock(&self.answers));
                waiting.iter().filter(|uid| !answers.contains_key(*uid)).take(MAX_SIZE).cloned().collect()
            };
            if ready.len() >= expected.min(MAX_SIZE) {
                return ready;
            }
            if tokio::time::timeout_at(end.min(Instant::now() + IDLE), arrived).await.is_err() {
                return ready;
            }
        }
    }
}

impl<C> Drop for QueueTicket<'_, C> {
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

    /// Requests a launch; returns the number of claims of the call if this claim made it.
    async fn request(batches: &LaunchBatches<()>, uid: &str, expected: usize) -> Option<usize> {
        let batch = batches.of("group", UnixMillis(0));
        let _ticket = batch.join(uid);
        let Turn::Call(_guard) = batch.turn(uid).await else { return None };
        let members = batch.gather(expected).await;
        let count = members.len();
        batch.answer(members.into_iter().map(|member| (member, refused())));
        batch.take(uid).map(|_| count)
    }

    #[tokio::test]
    async fn a_claim_is_answered_while_calls_for_others_go_on() {
        let batches: LaunchBatches<()> = LaunchBatches::default();
        let batch = batches.of("group", UnixMillis(0));
        let Turn::Call(guard) = batch.turn("a").await else { panic!("no call is made yet") };
        let mut waiting = pin!(batch.turn("b"));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        batch.answer([("c".to_owned(), refused())]);
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        batch.answer([("b".to_owned(), refused())]);
        let answered = tokio::time::timeout(MAX_WINDOW, waiting).await;
        let Ok(Turn::Answered(answer)) = answered else { panic!("no answer") };
        assert_eq!(answer.unwrap_err(), LaunchError::Throttled);
        drop(guard);
    }

    #[tokio::test]
    async fn one_call_is_made_as_soon_as_all_claims_have_arrived() {
        let batches = LaunchBatches::default();
        let begin = Instant::now();
        let uids: Vec<String> = (0..200).map(|number| number.to_string()).collect();
        let calls = futures::future::join_all(uids.iter().map(|uid| request(&batches, uid, 200))).await;
        assert_eq!(calls.into_iter().flatten().collect::<Vec<_>>(), [200]);
        assert!(begin.elapsed() < IDLE, "no wait for other claims: {:?}", begin.elapsed());
    }

    #[tokio::test]
    async fn a_batch_does_not_wait_long_for_missing_claims() {
        let batches = LaunchBatches::default();
        let begin = Instant::now();
        let calls = futures::future::join(request(&batches, "a", 3), request(&batches, "b", 3)).await;
        assert_eq!(calls, (Some(2), None));
        assert!(begin.elapsed() >= IDLE && begin.elapsed() < MAX_WINDOW, "{:?}", begin.elapsed());
        assert_eq!(request(&batches, "a", 1).await, Some(1), "an error is returned once, then the launch is retried");
    }

    #[tokio::test]
    async fn a_canceled_request_leaves_the_queue_and_releases_the_lock() {
        let batches = LaunchBatches::default();
        let early = tokio::time::timeout(Duration::from_millis(1), request(&batches, "a", 3)).await;
        assert!(early.is_err());
        assert_eq!(request(&batches, "b", 1).await, Some(1));
    }

    #[tokio::test]
    async fn batches_unused_for_an_hour_are_deleted() {
        let batches: LaunchBatches<()> = LaunchBatches::default();
        drop(batches.of("old", UnixMillis(0)));
        let held = batches.of("held", UnixMillis(0));
        drop(batches.of("new", UnixMillis(0) + MEMORY));
        assert_eq!(lock(&batches.by_launch_group).len(), 2);
        drop(held);
    }
}
