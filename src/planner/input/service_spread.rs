//! Default topology spread of the pods that a Service selects.

use std::collections::HashMap;
use std::sync::Arc;

use stowage_model::pod_class::{PodClass, Selector};
use stowage_model::requirement::ValueSet;

use crate::input::default_spread::CONTROLLER;
use crate::input::pod::Labels;
use crate::input::problem::Problem;

/// The problem with default constraints on the pods that declare none, have no controller that spreads them, and are selected by a
/// Service; `None` where there is no such pod. The constraint counts every pod that the Services select.
pub(crate) fn with_services(problem: &Problem) -> Option<Problem> {
    let services = &problem.services;
    if services.is_empty() {
        return None;
    }
    let mut classes: HashMap<(*const PodClass, Labels), Arc<PodClass>> = HashMap::new();
    let mut changed: Vec<(usize, Arc<PodClass>)> = Vec::new();
    for (at, pod) in problem.pods.iter().enumerate() {
        if !pod.class.spread.is_empty() || pod.labels.contains_key(CONTROLLER) {
            continue;
        }
        let Some(merged) = services.selecting(pod) else { continue };
        let class = classes.entry((Arc::as_ptr(&pod.class), merged)).or_insert_with_key(|(_, merged)| {
            let terms = merged.iter().map(|(key, value)| (Arc::from(key.as_str()), ValueSet::one(value))).collect();
            Arc::new(PodClass { spread: services.spread_over(&Selector { terms }), ..PodClass::clone(&pod.class) })
        });
        changed.push((at, Arc::clone(class)));
    }
    if changed.is_empty() {
        return None;
    }
    let mut out = problem.clone();
    for (at, class) in changed {
        out.pods[at].class = class;
    }
    Some(out)
}
