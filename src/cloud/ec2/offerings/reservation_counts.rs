//! How many instances still fit each capacity reservation: what EC2 last said, less what was launched or is being launched
//! since, more what was terminated since.
//!
//! A reservation that nobody has described has no room. Time is an argument.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Counts outlive a failing API for so long, milliseconds.
const MEMORY_MS: i64 = 86_400_000;
/// A launch that nobody has heard of for so long does not come about any more, milliseconds: its claim was given up.
const LAUNCH_MS: i64 = 300_000;

/// A place that a claim has in a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Its launch is under way since then, milliseconds since the epoch.
    Asked(i64),
    /// It was launched then, milliseconds since the epoch.
    Launched(i64),
}

#[derive(Clone, Debug, Default)]
struct Count {
    /// What EC2 said, corrected by what is known to have left since.
    described: i64,
    /// When it was asked, milliseconds since the epoch.
    asked_ms: i64,
    /// Places taken since, by UID of the claim.
    places: BTreeMap<String, Place>,
}

impl Count {
    fn left(&self) -> i64 {
        (self.described - i64::try_from(self.places.len()).unwrap_or(i64::MAX)).max(0)
    }
}

/// The counts of all reservations.
#[derive(Clone, Debug, Default)]
pub struct ReservationCounts {
    by_id: BTreeMap<String, Count>,
    /// Reservation by id of the instance that runs in it.
    instances: HashMap<String, String>,
    changes: u64,
}

impl ReservationCounts {
    /// Takes in what EC2 answered when it was asked at `asked_ms`: available instances by id.
    pub fn describe<'a>(&mut self, found: impl IntoIterator<Item = (&'a str, i64)>, asked_ms: i64) {
        for (id, available) in found {
            self.change(id, |count| {
                if asked_ms < count.asked_ms {
                    return;
                }
                count.places.retain(|_, place| match place {
                    Place::Asked(at) => asked_ms - *at < LAUNCH_MS,
                    Place::Launched(at) => *at >= asked_ms,
                });
                (count.described, count.asked_ms) = (available, asked_ms);
            });
        }
        let before = self.by_id.len();
        self.by_id.retain(|_, count| asked_ms - count.asked_ms < MEMORY_MS);
        self.changes += u64::from(self.by_id.len() != before);
    }

    /// Instances that still fit a reservation; 0 where that is not known.
    pub fn left(&self, id: &str) -> i64 {
        self.by_id.get(id).map_or(0, Count::left)
    }

    /// A number that is another one whenever a count is.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Takes a place for a claim that is being launched. It has one at most.
    pub fn take(&mut self, id: &str, claim: &str, now_ms: i64) {
        self.give_back(claim);
        self.change(id, |count| {
            count.places.insert(claim.to_owned(), Place::Asked(now_ms));
        });
    }

    /// Gives back the place of a claim whose launch did not come about.
    pub fn give_back(&mut self, claim: &str) {
        let held = |count: &&mut Count| matches!(count.places.get(claim), Some(Place::Asked(_)));
        for count in self.by_id.values_mut().filter(held) {
            let before = count.left();
            count.places.remove(claim);
            self.changes += u64::from(count.left() != before);
        }
    }

    /// A claim's launch came about.
    pub fn launched(&mut self, claim: &str, instance: &str, now_ms: i64) {
        for (id, count) in &mut self.by_id {
            if let Some(place) = count.places.get_mut(claim) {
                *place = Place::Launched(now_ms);
                self.instances.insert(instance.to_owned(), id.clone());
            }
        }
    }

    /// EC2 found a reservation full, whatever it said before.
    pub fn found_full(&mut self, id: &str, now_ms: i64) {
        self.change(id, |count| {
            let launched = count.places.values().filter(|place| matches!(place, Place::Launched(_)));
            count.described = i64::try_from(launched.count()).unwrap_or(i64::MAX);
            // An answer to a question from before knows nothing of it.
            count.asked_ms = now_ms;
        });
    }

    /// The reservation of an instance takes instances back: there is no room in it for a while.
    pub fn interrupted(&mut self, instance: &str, now_ms: i64) {
        if let Some(id) = self.instances.get(instance).cloned() {
            self.found_full(&id, now_ms);
        }
    }

    /// An instance is gone, its place is free again.
    pub fn gone(&mut self, instance: &str) {
        if let Some(id) = self.instances.remove(instance) {
            self.change(&id, |count| count.described += 1);
        }
    }

    /// Takes in the instances that run in reservations now, by id with the reservation's; others are gone.
    pub fn running<'a>(&mut self, found: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let mut live: BTreeSet<&str> = BTreeSet::new();
        for (instance, id) in found {
            live.insert(instance);
            if !self.instances.contains_key(instance) {
                self.instances.insert(instance.to_owned(), id.to_owned());
            }
        }
        let gone: Vec<String> = self.instances.keys().filter(|known| !live.contains(known.as_str())).cloned().collect();
        for instance in gone {
            self.gone(&instance);
        }
    }

    fn change(&mut self, id: &str, how: impl FnOnce(&mut Count)) {
        let count = self.by_id.entry(id.to_owned()).or_default();
        let before = count.left();
        how(count);
        self.changes += u64::from(count.left() != before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(available: i64) -> ReservationCounts {
        let mut counts = ReservationCounts::default();
        counts.describe([("cr-1", available)], 1_000);
        counts
    }

    #[test]
    fn an_unknown_reservation_has_no_room() {
        assert_eq!(counts(3).left("cr-2"), 0);
        assert_eq!(counts(3).left("cr-1"), 3);
    }

    #[test]
    fn the_count_falls_with_launches_under_way_and_rises_when_they_fail() {
        let mut counts = counts(2);
        let before = counts.changes();
        counts.take("cr-1", "a", 1_100);
        counts.take("cr-1", "b", 1_100);
        assert_eq!(counts.left("cr-1"), 0);
        assert!(counts.changes() > before);
        counts.take("cr-1", "a", 1_200);
        assert_eq!(counts.left("cr-1"), 0, "a claim has one place");
        counts.give_back("a");
        counts.give_back("a");
        assert_eq!(counts.left("cr-1"), 1);
        counts.launched("b", "i-b", 1_300);
        counts.give_back("b");
        assert_eq!(counts.left("cr-1"), 1, "what is launched stays");
    }

    #[test]
    fn a_claim_that_moves_to_another_reservation_leaves_the_first() {
        let mut counts = counts(1);
        counts.describe([("cr-2", 1)], 1_000);
        counts.take("cr-1", "a", 1_100);
        counts.take("cr-2", "a", 1_200);
        assert_eq!((counts.left("cr-1"), counts.left("cr-2")), (1, 0));
    }

    #[test]
    fn an_answer_counts_what_was_launched_before_the_question_and_not_what_came_after() {
        let mut counts = counts(5);
        for (claim, at) in [("a", 1_100), ("b", 2_100)] {
            counts.take("cr-1", claim, at);
            counts.launched(claim, claim, at);
        }
        counts.take("cr-1", "c", 2_200);
        counts.describe([("cr-1", 4)], 2_000);
        assert_eq!(counts.left("cr-1"), 2, "a is in the answer, b and c are not");
        counts.describe([("cr-1", 9)], 1_500);
        assert_eq!(counts.left("cr-1"), 2, "an older answer that comes late is not heard");
        counts.describe([("cr-1", 3)], 2_200 + LAUNCH_MS);
        assert_eq!(counts.left("cr-1"), 3, "c was given up");
    }

    #[test]
    fn c14_a_full_reservation_has_no_room_until_it_is_described_or_an_instance_leaves() {
        let mut counts = counts(5);
        counts.take("cr-1", "a", 1_100);
        counts.launched("a", "i-a", 1_200);
        counts.take("cr-1", "b", 1_300);
        counts.found_full("cr-1", 1_400);
        counts.give_back("b");
        counts.describe([("cr-1", 5)], 1_350);
        assert_eq!(counts.left("cr-1"), 0);
        counts.gone("i-a");
        counts.gone("i-a");
        assert_eq!(counts.left("cr-1"), 1, "counted once");
        counts.describe([("cr-1", 4)], 60_000);
        assert_eq!(counts.left("cr-1"), 4);
    }

    #[test]
    fn an_interrupted_instance_closes_its_reservation() {
        let mut counts = counts(5);
        counts.running([("i-1", "cr-1")]);
        counts.interrupted("i-other", 2_000);
        assert_eq!(counts.left("cr-1"), 5);
        counts.interrupted("i-1", 2_000);
        assert_eq!(counts.left("cr-1"), 0);
    }

    #[test]
    fn an_instance_that_is_not_listed_any_more_has_left() {
        let mut counts = counts(5);
        counts.running([("i-1", "cr-1"), ("i-2", "cr-1")]);
        counts.running([("i-2", "cr-1")]);
        assert_eq!(counts.left("cr-1"), 6);
        counts.running([("i-2", "cr-1")]);
        assert_eq!(counts.left("cr-1"), 6);
    }

    #[test]
    fn counts_outlive_a_failing_api_for_a_day() {
        let mut counts = counts(5);
        counts.describe([("cr-2", 1)], MEMORY_MS);
        assert_eq!(counts.left("cr-1"), 5);
        counts.describe([("cr-2", 1)], MEMORY_MS + 1_000);
        assert_eq!(counts.left("cr-1"), 0);
    }
}
