//! Reach of sums (subset-sum with repetition): the largest sum of requests that fits a capacity. A node of 1930m CPU holds at most
//! 1900m of pods that all request multiples of 100m, so the lower bound counts 1900m.

use std::collections::BTreeSet;

/// Distinct requests above which every capacity is assumed to be usable in full.
pub(crate) const MAX_REQUESTS: usize = 64;
/// Capacities up to this many units are tabulated. Larger capacities are rounded down to a whole unit.
const TABULATED_UNITS: usize = 4096;

/// The largest reachable sums of the requests of one resource.
pub(crate) struct Reach {
    /// Greatest common divisor of the requests.
    unit: i64,
    /// Largest reachable sum of at most this many units, in units.
    largest: Vec<i64>,
}

impl Reach {
    /// `None` without requests or with more than [`MAX_REQUESTS`]. Each request may occur any number of times.
    pub fn of(requests: &BTreeSet<i64>) -> Option<Self> {
        if requests.is_empty() || requests.len() > MAX_REQUESTS {
            return None;
        }
        let unit = requests.iter().copied().fold(0, gcd);
        let steps: Vec<usize> = requests.iter().filter_map(|n| usize::try_from(n / unit).ok()).collect();
        let mut largest = vec![0; TABULATED_UNITS];
        for at in 1..TABULATED_UNITS {
            let reached = steps.iter().any(|step| *step <= at && largest[at - step] == units(at - step));
            largest[at] = if reached { units(at) } else { largest[at - 1] };
        }
        Some(Self { unit, largest })
    }

    /// The most that requests can use of a capacity.
    pub fn usable(&self, room: i64) -> i64 {
        let whole = room.max(0) / self.unit;
        usize::try_from(whole).ok().and_then(|at| self.largest.get(at)).copied().unwrap_or(whole) * self.unit
    }
}

fn units(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacity_counts_as_far_as_sums_of_requests_reach() {
        let reach = Reach::of(&BTreeSet::from([250, 400])).unwrap();
        for (room, usable) in
            [(-5, 0), (240, 0), (250, 250), (399, 250), (660, 650), (700, 650), (950, 900), (1930, 1900)]
        {
            assert_eq!(reach.usable(room), usable, "{room}");
        }
        assert_eq!(reach.usable(1_000_049), 1_000_000, "beyond the table only the unit counts");
    }

    #[test]
    fn no_requests_or_too_many_have_no_reach() {
        assert!(Reach::of(&BTreeSet::new()).is_none());
        assert!(Reach::of(&(1..100).collect()).is_none());
    }
}
