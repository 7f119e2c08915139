//! Nodes that are not what is asked for any more, and go once something else is there.

use std::collections::BTreeSet;

/// A drifted node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// NodeClaim.
    pub claim: String,
    /// NodePool.
    pub pool: String,
    /// Since when it has drifted, milliseconds since the epoch.
    pub since_ms: i64,
    /// Pods on it that need another place.
    pub pods: usize,
    /// Why it may not be disrupted now, for people.
    pub obstacle: Option<String>,
}

/// The candidates that may go now, in the order in which they are tried: empty ones first, then those that drifted first (core
/// reference 4.12). Claims in `put_off` are left out.
pub fn order<'a>(candidates: &'a [Candidate], put_off: &BTreeSet<String>) -> Vec<&'a Candidate> {
    let due = |candidate: &&Candidate| candidate.obstacle.is_none() && !put_off.contains(&candidate.claim);
    let mut out: Vec<&Candidate> = candidates.iter().filter(due).collect();
    out.sort_by(|a, b| (a.pods > 0, a.since_ms, &a.claim).cmp(&(b.pods > 0, b.since_ms, &b.claim)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_nodes_go_first_and_then_those_that_drifted_first() {
        let candidate = |claim: &str, since_ms, pods, obstacle: Option<&str>| Candidate {
            claim: claim.into(),
            pool: "p".into(),
            since_ms,
            pods,
            obstacle: obstacle.map(str::to_owned),
        };
        let all = [
            candidate("young", 30, 2, None),
            candidate("old", 10, 5, None),
            candidate("empty", 40, 0, None),
            candidate("guarded", 1, 0, Some("a pod is protected")),
            candidate("failed", 5, 1, None),
        ];
        let names = |put_off: &[&str]| {
            let put_off = put_off.iter().map(|name| (*name).to_owned()).collect();
            order(&all, &put_off).into_iter().map(|found| found.claim.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&["failed"]), ["empty", "old", "young"]);
        assert_eq!(names(&[]), ["empty", "failed", "old", "young"]);
    }
}
