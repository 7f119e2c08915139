//! Heartbeats: how long each loop has been in one turn. A turn begins when the wait between two turns ends. A request to the API server
//! that returns, with whatever result, is progress and restarts the turn, because every request has a time limit: a loop that is stuck
//! anywhere else is overdue after its limit.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::sync::lock;

tokio::task_local! {
    /// The loop that the current task runs.
    static CURRENT: Registration;
    /// What the current task does for a loop that another task runs.
    static SPAWNED: Option<Work>;
}

/// What the current task does, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Name of the loop.
    pub name: &'static str,
    /// Random identifier of the turn; `None` between two turns.
    pub turn: Option<Uuid>,
}

/// Gets the name of the loop of each turn that ends, its duration, and whether it ended without a failure.
type Observer = dyn Fn(&'static str, Duration, bool) + Send + Sync;

/// The loops of the process. Clones share them.
#[derive(Clone, Default)]
pub struct Heartbeats {
    loops: Arc<Mutex<Vec<Arc<Loop>>>>,
    observer: Option<Arc<Observer>>,
}

impl fmt::Debug for Heartbeats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heartbeats").field("loops", &self.loops).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Loop {
    name: &'static str,
    limit: Duration,
    /// `None` between two turns.
    present: Mutex<Option<Present>>,
    /// When the last turn ended.
    completed: Mutex<Option<Instant>>,
}

/// The present turn of a loop.
#[derive(Clone, Copy, Debug)]
struct Present {
    id: Uuid,
    begun: Instant,
    /// When it began or last made progress.
    since: Instant,
    failed: bool,
}

impl Present {
    fn new() -> Self {
        let now = Instant::now();
        Self { id: random_id(), begun: now, since: now, failed: false }
    }
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
    /// No loops so far; `observer` is called when a turn ends.
    pub fn observed_by(observer: impl Fn(&'static str, Duration, bool) + Send + Sync + 'static) -> Self {
        Self { observer: Some(Arc::new(observer)), ..Self::default() }
    }

    /// Runs a loop whose turns may take up to `limit`. The loop waits with [`rest`] between two turns.
    pub fn run<F: Future>(
        &self,
        name: &'static str,
        limit: Duration,
        future: F,
    ) -> impl Future<Output = F::Output> + use<F> {
        let registered =
            Arc::new(Loop { name, limit, present: Mutex::new(Some(Present::new())), completed: Mutex::default() });
        lock(&self.loops).push(Arc::clone(&registered));
        CURRENT.scope(Registration { heartbeats: self.clone(), registered }, future)
    }

    /// The present turn of each loop, by name. Of several loops of one name, the turn that is the longest.
    pub fn turns(&self, now: Instant) -> Vec<Turn> {
        let age =
            |each: &Loop| lock(&each.present).map_or(Duration::ZERO, |turn| now.saturating_duration_since(turn.since));
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

fn random_id() -> Uuid {
    uuid::Builder::from_random_bytes(fastrand::u128(..).to_ne_bytes()).into_uuid()
}

/// What the current task does; `None` outside of a loop.
pub fn current() -> Option<Work> {
    let spawned = SPAWNED.try_with(|work| *work).ok().flatten();
    spawned.or_else(|| {
        let of = |current: &Registration| Work {
            name: current.registered.name,
            turn: lock(&current.registered.present).map(|turn| turn.id),
        };
        CURRENT.try_with(of).ok()
    })
}

/// Work of the current loop for a task of its own, which may outlast the turn: it has an identifier of its own.
pub fn for_spawned<F: Future>(future: F) -> impl Future<Output = F::Output> {
    SPAWNED.scope(current().map(|work| Work { turn: Some(random_id()), ..work }), future)
}

/// Records that the current turn makes progress.
pub fn progress() {
    let _ = CURRENT.try_with(|current| {
        if let Some(turn) = &mut *lock(&current.registered.present) {
            turn.since = Instant::now();
        }
    });
}

/// Records that the current turn failed.
pub fn fail() {
    let _ = CURRENT.try_with(|current| {
        if let Some(turn) = &mut *lock(&current.registered.present) {
            turn.failed = true;
        }
    });
}

/// Awaits `wait` outside of a turn: the turn before it ends, and the next begins afterwards.
pub async fn rest<T>(wait: impl Future<Output = T>) -> T {
    let _ = CURRENT.try_with(end_turn);
    let out = wait.await;
    let _ = CURRENT.try_with(|current| *lock(&current.registered.present) = Some(Present::new()));
    out
}

/// [`rest`] for a loop that has nothing to do.
pub async fn rest_forever<T>() -> T {
    rest(std::future::pending()).await
}

fn end_turn(current: &Registration) {
    let (ended, now) = (lock(&current.registered.present).take(), Instant::now());
    *lock(&current.registered.completed) = Some(now);
    if let Some((turn, observe)) = ended.zip(current.heartbeats.observer.as_ref()) {
        observe(current.registered.name, now.saturating_duration_since(turn.begun), !turn.failed);
    }
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
        let since = lock(&lock(&heartbeats.loops)[0].present).unwrap().since;
        assert!(since >= begun, "the turn is counted from the response");
    }

    #[tokio::test]
    async fn each_turn_and_each_spawned_task_has_an_identifier_of_its_own() {
        assert_eq!(current(), None);
        let heartbeats = Heartbeats::default();
        let seen = heartbeats
            .run("l", LIMIT, async {
                let first = [current(), current()];
                let waiting = rest(async { current() }).await;
                let spawned = tokio::spawn(for_spawned(async { [current(), current()] })).await.unwrap();
                let alone = tokio::spawn(async { current() }).await.unwrap();
                (first, waiting, [current(), current()], spawned, alone)
            })
            .await;
        let (first, waiting, second, spawned, alone) = seen;
        assert_eq!((waiting, alone), (Some(Work { name: "l", turn: None }), None));
        let mut ids = std::collections::BTreeSet::new();
        for [before, after] in [first, second, spawned] {
            assert_eq!(before, after);
            ids.insert(before.filter(|work| work.name == "l").and_then(|work| work.turn).unwrap());
        }
        assert_eq!(ids.len(), 3);
    }

    #[tokio::test]
    async fn an_observer_gets_each_turn_from_its_begin_and_whether_it_failed() {
        let (sender, turns) = std::sync::mpsc::channel();
        let heartbeats = Heartbeats::observed_by(move |name, took, ok| sender.send((name, took, ok)).unwrap());
        let pause = Duration::from_millis(20);
        let turns_of_l = heartbeats.run("l", LIMIT, async {
            tokio::time::sleep(pause).await;
            progress();
            rest(async {}).await;
            fail();
            rest(async {}).await;
            rest(tokio::time::sleep(pause)).await;
        });
        turns_of_l.await;
        let seen: Vec<(&str, Duration, bool)> = turns.try_iter().collect();
        assert_eq!(
            seen.iter().map(|(name, _, ok)| (*name, *ok)).collect::<Vec<_>>(),
            [("l", true), ("l", false), ("l", true)]
        );
        assert!(seen[0].1 >= pause, "progress does not shorten it: {:?}", seen[0].1);
    }

    #[tokio::test]
    async fn outside_of_a_registered_loop_nothing_is_recorded() {
        progress();
        assert_eq!(rest(async { 1 }).await, 1);
    }
}
