//! Heartbeats: how long each loop has been in one turn. A turn begins when the wait between two turns ends. A request to the API server
//! that returns, with whatever result, is progress and restarts the turn, because every request has a time limit: a loop that is stuck
//! anywhere else is overdue after its limit.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::sync::lock;

tokio::task_local! {
    /// The loop that the current task runs.
    static CURRENT: Registration;
}

/// The loops of the process. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Heartbeats {
    loops: Arc<Mutex<Vec<Arc<Loop>>>>,
}

#[derive(Debug)]
struct Loop {
    name: &'static str,
    limit: Duration,
    /// When the turn began or last made progress; `None` between two turns.
    since: Mutex<Option<Instant>>,
    /// When the last turn ended.
    completed: Mutex<Option<Instant>>,
}

/// Removes the loop when it ends.
struct Registration {
    heartbeats: Heartbeats,
    registered: Arc<Loop>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        lock(&self.heartbeats.loops).retain(|other| !Arc::ptr_eq(other, &self.registered));
    }
}

/// How long a loop has been in a turn without progress; zero between two turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub name: &'static str,
    pub age: Duration,
    pub limit: Duration,
    /// Time since the end of the last turn; `None` before. Watches have one turn only.
    pub completed: Option<Duration>,
}

impl Heartbeats {
    /// Runs a loop whose turns may take up to `limit`. The loop waits with [`rest`] between two turns.
    pub fn run<F: Future>(
        &self,
        name: &'static str,
        limit: Duration,
        future: F,
    ) -> impl Future<Output = F::Output> + use<F> {
        let registered =
            Arc::new(Loop { name, limit, since: Mutex::new(Some(Instant::now())), completed: Mutex::default() });
        lock(&self.loops).push(Arc::clone(&registered));
        CURRENT.scope(Registration { heartbeats: self.clone(), registered }, future)
    }

    /// The present turn of each loop, by name. Of several loops of one name, the turn that is the longest.
    pub fn turns(&self, now: Instant) -> Vec<Turn> {
        let age = |each: &Loop| lock(&each.since).map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let completed = |each: &Loop| lock(&each.completed).map(|at| now.saturating_duration_since(at));
        let turn =
            |each: &Arc<Loop>| Turn { name: each.name, age: age(each), limit: each.limit, completed: completed(each) };
        let mut turns: Vec<Turn> = lock(&self.loops).iter().map(turn).collect();
        turns.sort_by_key(|turn| (turn.name, std::cmp::Reverse(turn.age)));
        turns.dedup_by_key(|turn| turn.name);
        turns
    }

    /// The loops that are in a turn for longer than their limit.
    pub fn overdue(&self, now: Instant) -> Vec<Turn> {
        self.turns(now).into_iter().filter(|turn| turn.age > turn.limit).collect()
    }
}

/// Records that the current turn makes progress.
pub fn progress() {
    let _ = CURRENT.try_with(|current| {
        if let Some(since) = &mut *lock(&current.registered.since) {
            *since = Instant::now();
        }
    });
}

/// Awaits `wait` outside of a turn: the turn before it ends, and the next begins afterwards.
pub async fn rest<T>(wait: impl Future<Output = T>) -> T {
    set(None);
    let out = wait.await;
    set(Some(Instant::now()));
    out
}

/// [`rest`] for a loop that has nothing to do.
pub async fn rest_forever<T>() -> T {
    rest(std::future::pending()).await
}

fn set(since: Option<Instant>) {
    let _ = CURRENT.try_with(|current| {
        if since.is_none() {
            *lock(&current.registered.completed) = Some(Instant::now());
        }
        *lock(&current.registered.since) = since;
    });
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const LIMIT: Duration = Duration::from_mins(3);

    fn after(minutes: u64) -> Instant {
        Instant::now() + Duration::from_mins(minutes)
    }

    fn names(turns: &[Turn]) -> Vec<&str> {
        turns.iter().map(|turn| turn.name).collect()
    }

    #[tokio::test]
    async fn a_loop_that_is_stuck_in_a_turn_is_overdue_and_one_that_waits_is_not() {
        let heartbeats = Heartbeats::default();
        let mut stuck = Box::pin(heartbeats.run("stuck", LIMIT, std::future::pending::<()>()));
        let mut waiting = Box::pin(heartbeats.run("waiting", LIMIT, rest_forever::<()>()));
        assert!(stuck.as_mut().now_or_never().is_none() && waiting.as_mut().now_or_never().is_none());
        assert!(heartbeats.overdue(after(2)).is_empty());
        assert_eq!(names(&heartbeats.overdue(after(4))), ["stuck"]);
        drop(stuck);
        assert!(heartbeats.overdue(after(4)).is_empty(), "a loop that ended is forgotten");
        assert_eq!(names(&heartbeats.turns(after(4))), ["waiting"]);
    }

    #[tokio::test]
    async fn a_turn_begins_after_the_wait_and_progress_restarts_it() {
        let heartbeats = Heartbeats::default();
        let (wake, woken) = tokio::sync::oneshot::channel::<()>();
        let (answer, answered) = tokio::sync::oneshot::channel::<()>();
        let mut looping = Box::pin(heartbeats.run("l", Duration::ZERO, async {
            let _ = rest(woken).await;
            let _ = answered.await;
            progress();
            std::future::pending::<()>().await;
        }));
        assert!(looping.as_mut().now_or_never().is_none());
        let waiting = heartbeats.turns(after(4))[0];
        assert_eq!(waiting.age, Duration::ZERO, "it waits");
        assert!(waiting.completed.is_some_and(|ago| ago >= Duration::from_mins(3)), "its first turn is complete");
        wake.send(()).unwrap();
        assert!(looping.as_mut().now_or_never().is_none());
        let begun = Instant::now();
        assert_eq!(names(&heartbeats.overdue(after(4))), ["l"]);
        answer.send(()).unwrap();
        assert!(looping.as_mut().now_or_never().is_none());
        let since = lock(&lock(&heartbeats.loops)[0].since).unwrap();
        assert!(since >= begun, "the turn is counted from the response");
    }

    #[tokio::test]
    async fn outside_of_a_registered_loop_nothing_is_recorded() {
        progress();
        assert_eq!(rest(async { 1 }).await, 1);
    }
}
