//! Topology on counts per domain, before any node is filled: every group that a rule on a zone (or any other key but the
//! host name) concerns is divided over that key's domains. What leaves here is pinned to its domains and needs no
//! further topology check but the host's.
//!
//! kube-scheduler binds the pods in any order, so the division is one that every order reaches, as far as the rules leave a
//! choice: counts of a spread selector are kept level over all pods it selects, whether they carry the constraint or not.

pub mod assign;
pub mod counts;
pub mod domains;
pub mod occupied;
pub mod rules;

#[cfg(test)]
mod tests;
