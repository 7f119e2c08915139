//! The topology stage works on counts per domain, before any node is filled: every group with a rule on a key other than the host name
//! is divided over places, tuples of the domains of its keys. The resulting assignments are pinned to their domains; later stages check rules per host only.
//!
//! kube-scheduler binds pods in any order. Invariant: as far as the rules permit, every order reaches the division, because the counts of a
//! spread selector stay level over all pods that it selects, with or without the constraint.

pub mod assign;
pub mod counts;
pub mod divide;
pub mod domains;
pub mod followers;
pub mod occupied;
pub mod places;
pub mod rules;

#[cfg(test)]
mod tests;
