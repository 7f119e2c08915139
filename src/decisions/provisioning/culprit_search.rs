//! Searches for the pods that make a plan fail: the planner panics over them, or the API server rejects a NodeClaim because of them. Also
//! for other inputs of plans.
//!
//! The search is by halves of an ordered list: first of namespaces, so that a culprit costs the pods of other namespaces nothing, then of
//! the pod classes of a guilty namespace. It needs about log₂ n trials per culprit, and it ends after a fixed number of trials.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use stowage_model::pod_class::PodClass;
use stowage_planner::PodEntry;

/// Pods that are tried together, as indexes into the pods of a problem.
#[derive(Debug, Default)]
struct Unit {
    /// The pods of each class; a unit with one class is not divided.
    classes: Vec<Vec<usize>>,
}

impl Unit {
    fn pods(&self) -> impl Iterator<Item = usize> {
        self.classes.iter().flatten().copied()
    }
}

/// What the next trial decides.
#[derive(Debug)]
enum Stage {
    /// Which unit of `rest` fails first: the accepted units pass with the first `low` of them, and fail with the first `high`.
    First {
        low: usize,
        high: usize,
    },
    /// Whether `unit` fails alone, or else together with which accepted unit: with the first `high` of them it fails, and with the first
    /// `low` it passes, once that is known.
    Partner {
        unit: Unit,
        low: Option<usize>,
        high: usize,
    },
    /// Whether the accepted units pass together with all of `rest`.
    Rest,
    Done,
}

/// The search. Repeat [`Self::trial`] and [`Self::record`] until there is no trial.
#[derive(Debug)]
pub struct CulpritSearch {
    accepted: Vec<Unit>,
    rest: Vec<Unit>,
    /// Guilty units of several classes.
    guilty: Vec<Unit>,
    /// Whether `rest` has the classes of a guilty unit.
    divided: bool,
    culprits: Vec<usize>,
    stage: Stage,
    /// The position of the next trial of [`Stage::First`], if it is not the middle.
    hint: Option<usize>,
    trials_left: usize,
}

/// Result of a search, as indexes into the pods of the problem, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Pods whose plan passes.
    pub accepted: Vec<usize>,
    /// Pods that make a plan fail, and pods of their namespaces that there was no trial left for.
    pub culprits: Vec<usize>,
    /// Pods of other namespaces that there was no trial left for.
    pub untried: Vec<usize>,
}

impl Verdict {
    /// All inputs of this number pass.
    pub fn all(count: usize) -> Self {
        Self { accepted: (0..count).collect(), ..Self::default() }
    }
}

impl CulpritSearch {
    /// Begins a search among `pods`, whose plan fails. `suspected` says which classes failed before: the first trial is without them.
    pub fn new(pods: &[PodEntry], suspected: impl Fn(&Arc<PodClass>) -> bool, max_trials: usize) -> Self {
        let mut namespaces: BTreeMap<(bool, &str), Unit> = BTreeMap::new();
        let mut class_index: HashMap<*const PodClass, usize> = HashMap::new();
        for (index, pod) in pods.iter().enumerate() {
            let unit = namespaces.entry((suspected(&pod.class), &*pod.class.namespace)).or_default();
            let class = *class_index.entry(Arc::as_ptr(&pod.class)).or_insert_with(|| {
                unit.classes.push(Vec::new());
                unit.classes.len() - 1
            });
            unit.classes[class].push(index);
        }
        let unsuspected = namespaces.keys().filter(|(suspected, _)| !suspected).count();
        Self::of_units(namespaces.into_values().collect(), unsuspected, max_trials)
    }

    /// Begins a search among inputs that belong to nobody, such as nodes: each one is a unit. The inputs are those of a plan that fails,
    /// and a plan without all of them passes.
    pub fn of_inputs(count: usize, suspected: impl Fn(usize) -> bool, max_trials: usize) -> Self {
        let (suspects, mut order): (Vec<usize>, Vec<usize>) = (0..count).partition(|input| suspected(*input));
        let unsuspected = order.len();
        order.extend(suspects);
        let units = order.into_iter().map(|input| Unit { classes: vec![vec![input]] });
        Self::of_units(units.collect(), unsuspected, max_trials)
    }

    /// Begins a search among units, whose plan fails; the first trial is with the first `unsuspected`.
    fn of_units(rest: Vec<Unit>, unsuspected: usize, max_trials: usize) -> Self {
        let mut search = Self {
            accepted: Vec::new(),
            guilty: Vec::new(),
            divided: false,
            culprits: Vec::new(),
            stage: Stage::First { low: 0, high: rest.len() },
            hint: Some(unsuspected).filter(|count| (1..rest.len()).contains(count)),
            trials_left: max_trials,
            rest,
        };
        search.settle();
        search
    }

    /// Pods to plan next; `None` at the end of the search.
    pub fn trial(&self) -> Option<Vec<usize>> {
        if self.trials_left == 0 {
            return None;
        }
        let of = |units: &[Unit]| units.iter().flat_map(Unit::pods).collect::<Vec<_>>();
        let mut pods = match &self.stage {
            Stage::First { low, high } => {
                let mut pods = of(&self.accepted);
                pods.extend(of(&self.rest[..self.hint.unwrap_or(usize::midpoint(*low, *high))]));
                pods
            }
            Stage::Partner { unit, low, high } => {
                let mut pods: Vec<usize> = unit.pods().collect();
                pods.extend(of(&self.accepted[..low.map_or(0, |low| usize::midpoint(low, *high))]));
                pods
            }
            Stage::Rest => {
                let mut pods = of(&self.accepted);
                pods.extend(of(&self.rest));
                pods
            }
            Stage::Done => return None,
        };
        pods.sort_unstable();
        Some(pods)
    }

    /// Records the result of [`Self::trial`].
    pub fn record(&mut self, passed: bool) {
        self.trials_left = self.trials_left.saturating_sub(1);
        match &mut self.stage {
            Stage::First { low, high } => {
                let at = self.hint.take().unwrap_or(usize::midpoint(*low, *high));
                *(if passed { low } else { high }) = at;
            }
            Stage::Partner { low, high, .. } => {
                let at = low.map_or(0, |low| usize::midpoint(low, *high));
                if passed {
                    *low = Some(at);
                } else {
                    *high = at;
                }
            }
            Stage::Rest if passed => {
                self.accepted.append(&mut self.rest);
                self.stage = Stage::Done;
            }
            Stage::Rest => self.stage = Stage::First { low: 0, high: self.rest.len() },
            Stage::Done => {}
        }
        self.settle();
    }

    /// Draws the conclusions that need no trial.
    fn settle(&mut self) {
        loop {
            match &mut self.stage {
                Stage::First { low, high } if *high - *low <= 1 => {
                    let low = *low;
                    self.accepted.extend(self.rest.drain(..low));
                    if self.rest.is_empty() {
                        self.stage = Stage::Done;
                        continue;
                    }
                    let unit = self.rest.remove(0);
                    self.stage = if self.accepted.is_empty() {
                        self.blame(unit);
                        Stage::Rest
                    } else {
                        Stage::Partner { unit, low: None, high: self.accepted.len() }
                    };
                }
                Stage::Partner { low, high, .. } if *high == 0 || low.is_some_and(|low| *high - low <= 1) => {
                    let high = *high;
                    let Stage::Partner { unit, .. } = std::mem::replace(&mut self.stage, Stage::Rest) else { return };
                    if high > 0 {
                        let partner = self.accepted.remove(high - 1);
                        self.blame(partner);
                    }
                    self.blame(unit);
                }
                Stage::Rest if self.rest.is_empty() => self.stage = Stage::Done,
                Stage::Done => {
                    let Some(unit) = self.guilty.pop() else { return };
                    self.divided = true;
                    self.rest = unit.classes.into_iter().map(|class| Unit { classes: vec![class] }).collect();
                    // Without the culprits found since, the unit may pass.
                    self.stage = Stage::Rest;
                }
                _ => return,
            }
        }
    }

    fn blame(&mut self, unit: Unit) {
        if unit.classes.len() > 1 {
            self.guilty.push(unit);
        } else {
            self.culprits.extend(unit.pods());
        }
    }

    /// The result; also before the end of the search.
    pub fn finish(mut self) -> Verdict {
        if let Stage::Partner { unit, .. } = std::mem::replace(&mut self.stage, Stage::Done) {
            self.culprits.extend(unit.pods());
        }
        self.culprits.extend(self.guilty.iter().flat_map(Unit::pods));
        let rest: Vec<usize> = self.rest.iter().flat_map(Unit::pods).collect();
        let untried = if self.divided {
            self.culprits.extend(rest);
            Vec::new()
        } else {
            rest
        };
        let accepted = self.accepted.iter().flat_map(Unit::pods).collect();
        let [accepted, culprits, untried] = [accepted, self.culprits, untried].map(|mut pods: Vec<usize>| {
            pods.sort_unstable();
            pods
        });
        Verdict { accepted, culprits, untried }
    }
}

#[cfg(test)]
mod tests;
