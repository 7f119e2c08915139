//! The available instances of each capacity reservation: the number that EC2 last reported, minus launches since (pending launches
//! included), plus terminations since.
//!
//! A reservation that was never described has no capacity left. Time is an argument.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use stowage_model::launch_timing::MAX_LAUNCH_DURATION;
use stowage_model::time::UnixMillis;

/// How long counts stay valid while the API fails.
const COUNT_TTL: Duration = Duration::from_hours(24);

/// Capacity of a reservation for one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Allocation {
    /// The launch is pending since then.
    Pending(UnixMillis),
    /// The instance was launched then.
    Launched(UnixMillis),
}

#[derive(Clone, Debug, Default)]
struct ReservationState {
    /// The number EC2 reported, plus terminations since.
    described: i64,
    /// When EC2 was called for it.
    described_at: UnixMillis,
    /// Allocations since, by launch and number of the place.
    allocations: BTreeMap<(String, usize), Allocation>,
}

impl ReservationState {
    fn available(&self) -> i64 {
        (self.described - i64::try_from(self.allocations.len()).unwrap_or(i64::MAX)).max(0)
    }
}

/// The counts of all reservations.
#[derive(Clone, Debug, Default)]
pub struct ReservationCounts {
    by_id: BTreeMap<String, ReservationState>,
    /// Reservation by id of the instance that runs in it.
    instances: HashMap<String, String>,
    version: u64,
}

impl ReservationCounts {
    /// Applies the available instances by reservation id that EC2 reported when it was called at `called_at`.
    pub fn set_described<'a>(&mut self, found: impl IntoIterator<Item = (&'a str, i64)>, called_at: UnixMillis) {
        for (id, available) in found {
            self.change(id, |state| {
                if called_at < state.described_at {
                    return;
                }
                state.allocations.retain(|_, allocation| match allocation {
                    Allocation::Pending(at) => !at.is_older_than(MAX_LAUNCH_DURATION, called_at),
                    Allocation::Launched(at) => *at >= called_at,
                });
                (state.described, state.described_at) = (available, called_at);
            });
        }
        let before = self.by_id.len();
        self.by_id.retain(|_, state| !state.described_at.is_older_than(COUNT_TTL, called_at));
        self.version += u64::from(self.by_id.len() != before);
    }

    /// The available instances of a reservation; 0 while unknown.
    pub fn available(&self, id: &str) -> i64 {
        self.by_id.get(id).map_or(0, ReservationState::available)
    }

    /// Changes whenever a count does.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Allocates capacity for `places` instances of a launch. A launch has allocations in one reservation at most.
    pub fn allocate(&mut self, id: &str, launch: &str, places: usize, now: UnixMillis) {
        self.release(launch);
        self.change(id, |state| {
            let places = (0..places).map(|place| ((launch.to_owned(), place), Allocation::Pending(now)));
            state.allocations.extend(places);
        });
    }

    /// Releases the pending allocations of a launch.
    pub fn release(&mut self, launch: &str) {
        self.truncate(launch, 0);
    }

    /// Releases the pending allocations of a launch beyond the first `places`.
    pub fn truncate(&mut self, launch: &str, places: usize) {
        for state in self.by_id.values_mut() {
            let before = state.available();
            state.allocations.retain(|(owner, place), allocation| {
                owner != launch || *place < places || matches!(allocation, Allocation::Launched(_))
            });
            self.version += u64::from(state.available() != before);
        }
    }

    /// Records the instances of a launch.
    pub fn record_launched(&mut self, launch: &str, instances: &[&str], now: UnixMillis) {
        for (id, state) in &mut self.by_id {
            for (place, instance) in instances.iter().enumerate() {
                if let Some(allocation) = state.allocations.get_mut(&(launch.to_owned(), place)) {
                    *allocation = Allocation::Launched(now);
                    self.instances.insert((*instance).to_owned(), id.clone());
                }
            }
        }
    }

    /// Records that EC2 found a reservation full, regardless of earlier reports.
    pub fn record_exhausted(&mut self, id: &str, now: UnixMillis) {
        self.change(id, |state| {
            let launched = state.allocations.values().filter(|one| matches!(one, Allocation::Launched(_)));
            state.described = i64::try_from(launched.count()).unwrap_or(i64::MAX);
            // A response to an earlier call must not overwrite this.
            state.described_at = now;
        });
    }

    /// Records that the reservation of an instance reclaims instances: it has no capacity for a while.
    pub fn record_interrupted(&mut self, instance: &str, now: UnixMillis) {
        if let Some(id) = self.instances.get(instance).cloned() {
            self.record_exhausted(&id, now);
        }
    }

    /// Records that an instance is terminated: its capacity is available again.
    pub fn record_terminated(&mut self, instance: &str) {
        if let Some(id) = self.instances.remove(instance) {
            self.change(&id, |state| state.described += 1);
        }
    }

    /// Applies the list of instances that run in reservations, as pairs of instance id and reservation id. All others are
    /// terminated.
    pub fn reconcile_running<'a>(&mut self, found: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let mut live: BTreeSet<&str> = BTreeSet::new();
        for (instance, id) in found {
            live.insert(instance);
            if !self.instances.contains_key(instance) {
                self.instances.insert(instance.to_owned(), id.to_owned());
            }
        }
        let terminated: Vec<String> =
            self.instances.keys().filter(|known| !live.contains(known.as_str())).cloned().collect();
        for instance in terminated {
            self.record_terminated(&instance);
        }
    }

    fn change(&mut self, id: &str, change: impl FnOnce(&mut ReservationState)) {
        let state = self.by_id.entry(id.to_owned()).or_default();
        let before = state.available();
        change(state);
        self.version += u64::from(state.available() != before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DESCRIBED_AT: UnixMillis = UnixMillis(1_000);

    fn counts(available: i64) -> ReservationCounts {
        let mut counts = ReservationCounts::default();
        counts.set_described([("cr-1", available)], DESCRIBED_AT);
        counts
    }

    #[test]
    fn an_unknown_reservation_has_no_capacity() {
        assert_eq!(counts(3).available("cr-2"), 0);
        assert_eq!(counts(3).available("cr-1"), 3);
    }

    #[test]
    fn the_count_falls_with_pending_launches_and_rises_when_they_fail() {
        let mut counts = counts(2);
        let before = counts.version();
        counts.allocate("cr-1", "a", 1, UnixMillis(1_100));
        counts.allocate("cr-1", "b", 1, UnixMillis(1_100));
        assert_eq!(counts.available("cr-1"), 0);
        assert!(counts.version() > before);
        counts.allocate("cr-1", "a", 1, UnixMillis(1_200));
        assert_eq!(counts.available("cr-1"), 0, "a claim has one allocation");
        counts.release("a");
        counts.release("a");
        assert_eq!(counts.available("cr-1"), 1);
        counts.record_launched("b", &["i-b"], UnixMillis(1_300));
        counts.release("b");
        assert_eq!(counts.available("cr-1"), 1, "a launched instance stays allocated");
    }

    #[test]
    fn a_launch_of_several_instances_releases_the_places_it_did_not_use() {
        let mut counts = counts(9);
        counts.allocate("cr-1", "a", 6, UnixMillis(1_100));
        assert_eq!(counts.available("cr-1"), 3);
        counts.truncate("a", 5);
        assert_eq!(counts.available("cr-1"), 4);
        counts.record_launched("a", &["i-1", "i-2"], UnixMillis(1_200));
        counts.release("a");
        assert_eq!(counts.available("cr-1"), 7);
        counts.record_terminated("i-2");
        assert_eq!(counts.available("cr-1"), 8);
    }

    #[test]
    fn a_claim_that_moves_to_another_reservation_leaves_the_first() {
        let mut counts = counts(1);
        counts.set_described([("cr-2", 1)], DESCRIBED_AT);
        counts.allocate("cr-1", "a", 1, UnixMillis(1_100));
        counts.allocate("cr-2", "a", 1, UnixMillis(1_200));
        assert_eq!((counts.available("cr-1"), counts.available("cr-2")), (1, 0));
    }

    #[test]
    fn a_description_includes_launches_before_the_call_and_not_later_ones() {
        let mut counts = counts(5);
        for (claim, at) in [("a", 1_100), ("b", 2_100)] {
            counts.allocate("cr-1", claim, 1, UnixMillis(at));
            counts.record_launched(claim, &[claim], UnixMillis(at));
        }
        counts.allocate("cr-1", "c", 1, UnixMillis(2_200));
        counts.set_described([("cr-1", 4)], UnixMillis(2_000));
        assert_eq!(counts.available("cr-1"), 2, "a is in the response, b and c are not");
        counts.set_described([("cr-1", 9)], UnixMillis(1_500));
        assert_eq!(counts.available("cr-1"), 2, "a late response to an earlier call is ignored");
        counts.set_described([("cr-1", 3)], UnixMillis(2_200) + MAX_LAUNCH_DURATION);
        assert_eq!(counts.available("cr-1"), 3, "the launch of c is abandoned");
    }

    #[test]
    fn c14_a_full_reservation_has_no_capacity_until_described_or_an_instance_leaves() {
        let mut counts = counts(5);
        counts.allocate("cr-1", "a", 1, UnixMillis(1_100));
        counts.record_launched("a", &["i-a"], UnixMillis(1_200));
        counts.allocate("cr-1", "b", 1, UnixMillis(1_300));
        counts.record_exhausted("cr-1", UnixMillis(1_400));
        counts.release("b");
        counts.set_described([("cr-1", 5)], UnixMillis(1_350));
        assert_eq!(counts.available("cr-1"), 0);
        counts.record_terminated("i-a");
        counts.record_terminated("i-a");
        assert_eq!(counts.available("cr-1"), 1, "counted once");
        counts.set_described([("cr-1", 4)], UnixMillis(60_000));
        assert_eq!(counts.available("cr-1"), 4);
    }

    #[test]
    fn an_interrupted_instance_closes_its_reservation() {
        let mut counts = counts(5);
        counts.reconcile_running([("i-1", "cr-1")]);
        counts.record_interrupted("i-other", UnixMillis(2_000));
        assert_eq!(counts.available("cr-1"), 5);
        counts.record_interrupted("i-1", UnixMillis(2_000));
        assert_eq!(counts.available("cr-1"), 0);
    }

    #[test]
    fn an_instance_that_is_not_listed_any_more_is_terminated() {
        let mut counts = counts(5);
        counts.reconcile_running([("i-1", "cr-1"), ("i-2", "cr-1")]);
        counts.reconcile_running([("i-2", "cr-1")]);
        assert_eq!(counts.available("cr-1"), 6);
        counts.reconcile_running([("i-2", "cr-1")]);
        assert_eq!(counts.available("cr-1"), 6);
    }

    #[test]
    fn counts_stay_valid_for_a_day_while_the_api_fails() {
        let mut counts = counts(5);
        counts.set_described([("cr-2", 1)], DESCRIBED_AT + COUNT_TTL - Duration::from_secs(1));
        assert_eq!(counts.available("cr-1"), 5);
        counts.set_described([("cr-2", 1)], DESCRIBED_AT + COUNT_TTL);
        assert_eq!(counts.available("cr-1"), 0);
    }
}
