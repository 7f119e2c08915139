//! Caps per minute on what the leader purchases and disrupts.

use std::sync::Mutex;

use crate::decisions::rate_cap::RateCap;
use crate::model::time::UnixMillis;
use crate::sync::lock;

/// What is capped per minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capped {
    /// NodeClaims that are created.
    Purchase,
    /// Nodes that are disrupted voluntarily, and instances that are collected as garbage.
    Disruption,
}

impl Capped {
    /// Value of the metric label `action`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Purchase => "purchase",
            Self::Disruption => "disruption",
        }
    }
}

/// The caps of [`Capped`].
#[derive(Debug, Default)]
pub struct Caps {
    purchases: Mutex<RateCap>,
    disruptions: Mutex<RateCap>,
}

impl Caps {
    /// See [`RateCap::admit`].
    pub fn admit(&self, what: Capped, wanted: usize, most: usize, now: UnixMillis) -> usize {
        lock(self.of(what)).admit(wanted, most, now)
    }

    /// See [`RateCap::admissible`].
    pub fn admissible(&self, what: Capped, most: usize, now: UnixMillis) -> usize {
        lock(self.of(what)).admissible(most, now)
    }

    /// See [`RateCap::take_back`].
    pub fn take_back(&self, what: Capped, count: usize) {
        lock(self.of(what)).take_back(count);
    }

    fn of(&self, what: Capped) -> &Mutex<RateCap> {
        match what {
            Capped::Purchase => &self.purchases,
            Capped::Disruption => &self.disruptions,
        }
    }
}
