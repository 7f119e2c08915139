//! Resources as dense vectors of plain `i64`: the common resources first, then every extended resource that pods or daemons request.
//!
//! The entries have no unit type: they are compared in the innermost loops, over all dimensions at once. An entry has the unit of its
//! dimension: millicores, bytes, pods, bytes, then units.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stowage_model::offering::InstanceType;
use stowage_model::pod_class::PodClass;
use stowage_model::resources::{Resources, UNLIMITED, attached_by};
use stowage_model::units::{Bytes, Millicores};

use crate::input::problem::Problem;

/// The resources of a problem, as positions in dense vectors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dims {
    extended: Vec<Arc<str>>,
    /// Attachments by driver that every new node keeps free for claims of several pods.
    reserved: BTreeMap<Arc<str>, i64>,
}

/// CPU, memory, pod slots and ephemeral storage come first in every dense vector.
pub(crate) const COMMON: usize = 4;
/// Position of the pod slots.
pub(crate) const PODS: usize = 2;

impl Dims {
    /// All dimensions that pods and daemons request.
    pub fn of(problem: &Problem) -> Self {
        let mut names: BTreeSet<&Arc<str>> = BTreeSet::new();
        let mut last: Option<*const PodClass> = None;
        for class in problem.pods.iter().map(|p| &p.class).chain(problem.daemons.iter().map(|d| &d.class)) {
            // Pods of one class are mostly adjacent.
            if last != Some(Arc::as_ptr(class)) {
                last = Some(Arc::as_ptr(class));
                names.extend(class.requests.extended.keys());
            }
        }
        Self { extended: names.into_iter().cloned().collect(), reserved: problem.volumes.reserved.clone() }
    }

    pub fn len(&self) -> usize {
        COMMON + self.extended.len()
    }

    pub fn dense(&self, resources: &Resources) -> Vec<i64> {
        let mut out = Vec::with_capacity(self.len());
        out.extend([resources.cpu.0, resources.memory.0, resources.pods, resources.ephemeral_storage.0]);
        out.extend(self.extended.iter().map(|name| resources.extended.get(name).copied().unwrap_or(0)));
        out
    }

    /// Subtracts resources from a dense vector.
    pub fn subtract(&self, dense: &mut [i64], resources: &Resources) {
        let common = [resources.cpu.0, resources.memory.0, resources.pods, resources.ephemeral_storage.0];
        for (have, less) in dense.iter_mut().zip(common) {
            *have = have.saturating_sub(less);
        }
        if !resources.extended.is_empty() {
            for (name, have) in self.extended.iter().zip(&mut dense[COMMON..]) {
                *have = have.saturating_sub(resources.extended.get(name).copied().unwrap_or(0));
            }
        }
    }

    /// Allocatable resources of an instance type, attachments included.
    pub fn dense_of(&self, instance_type: &InstanceType) -> Vec<i64> {
        let mut out = self.dense(&instance_type.allocatable);
        for (name, have) in self.extended.iter().zip(&mut out[COMMON..]) {
            if let Some(driver) = attached_by(name) {
                let limit = instance_type.volume_limits.get(driver).copied().unwrap_or(UNLIMITED);
                *have = (limit - self.reserved.get(driver).copied().unwrap_or(0)).max(0);
            }
        }
        out
    }

    /// Whether a dimension counts attached volumes. It has no price: it constrains only when it is exhausted.
    pub fn is_attach(&self, dim: usize) -> bool {
        dim.checked_sub(COMMON).is_some_and(|at| attached_by(&self.extended[at]).is_some())
    }

    pub fn sparse(&self, dense: &[i64]) -> Resources {
        let mut out = Resources {
            cpu: Millicores(dense[0]),
            memory: Bytes(dense[1]),
            pods: dense[PODS],
            ephemeral_storage: Bytes(dense[3]),
            ..Resources::default()
        };
        for (name, value) in self.extended.iter().zip(&dense[COMMON..]) {
            out.set(name, *value);
        }
        out
    }
}

/// Whether `need` fits `room`. A resource that is not requested never prevents a fit, even where it is overcommitted.
#[inline]
pub(crate) fn fits(need: &[i64], room: &[i64]) -> bool {
    // The common resources are compared without branches: no other function is called as often.
    match (need.split_first_chunk::<COMMON>(), room.split_first_chunk::<COMMON>()) {
        (Some((need, more)), Some((room, rest))) => {
            let common = need.iter().zip(room).fold(true, |fits, (n, r)| fits & (*n <= (*r).max(0)));
            common && more.iter().zip(rest).all(|(n, r)| *n <= (*r).max(0))
        }
        _ => need.iter().zip(room).all(|(n, r)| *n <= (*r).max(0)),
    }
}

/// Whether a request includes an extended resource or a volume attachment.
pub(crate) fn is_extended(need: &[i64]) -> bool {
    need[COMMON..].iter().any(|n| *n > 0)
}

/// An integer quantity as a float, for scores and prices; capacity tests stay on integers.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn real(n: i64) -> f64 {
    n as f64
}

/// A count as a float.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn float(n: usize) -> f64 {
    n as f64
}

/// Dot product of a quantity vector with prices or weights.
pub(crate) fn dot(quantities: &[i64], weights: &[f64]) -> f64 {
    quantities.iter().zip(weights).map(|(n, w)| real(*n) * w).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_request_fits_even_without_room() {
        let table = [
            (vec![0, 0, 1, 0], vec![-5, -1, 1, 0], true),
            (vec![1, 0, 1, 0], vec![0, 5, 5, 5], false),
            (vec![1, 1, 1, 1], vec![1, 1, 1, 1], true),
            (vec![0, 0, 0, 0, 2], vec![9, 9, 9, 9, 1], false),
            (vec![0, 0, 0, 0, 0], vec![-9, 9, 9, 9, -1], true),
            (vec![3, 0], vec![2, 0], false),
        ];
        for (need, room, want) in table {
            assert_eq!(fits(&need, &room), want, "{need:?} in {room:?}");
        }
    }
}
