//! Nodes that nobody needs any more.

use std::collections::BTreeMap;

/// A node that may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// NodeClaim.
    pub claim: String,
    /// NodePool.
    pub pool: String,
    /// Pods on it or held for it that would need another place.
    pub pods: usize,
    /// Last time a pod came or went, or its initialization: milliseconds since the epoch.
    pub quiet_since_ms: i64,
    /// Protected by `karpenter.sh/do-not-disrupt`.
    pub protected: bool,
    /// Micro-USD per hour: dearer nodes go first.
    pub price: i64,
}

/// What a pool says of its empty nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// `consolidateAfter`; `None` is `Never`.
    pub consolidate_after_ms: Option<i64>,
    /// How many may go now.
    pub allowed: i64,
}

/// Claims to delete now, dearest first within each pool's allowance, and when to look again.
pub fn decide(candidates: &[Candidate], rules: &BTreeMap<String, Rule>, now_ms: i64) -> (Vec<String>, Option<i64>) {
    let mut left: BTreeMap<&str, i64> = BTreeMap::new();
    let mut order: Vec<&Candidate> =
        candidates.iter().filter(|candidate| candidate.pods == 0 && !candidate.protected).collect();
    order.sort_by(|a, b| b.price.cmp(&a.price).then_with(|| a.claim.cmp(&b.claim)));
    let (mut go, mut again) = (Vec::new(), None::<i64>);
    for candidate in order {
        let Some(rule) = rules.get(&candidate.pool) else {
            continue;
        };
        let Some(after) = rule.consolidate_after_ms else {
            continue;
        };
        let due = candidate.quiet_since_ms + after;
        if due > now_ms {
            again = Some(again.map_or(due, |at| at.min(due)));
            continue;
        }
        let left = left.entry(&candidate.pool).or_insert(rule.allowed);
        if *left > 0 {
            *left -= 1;
            go.push(candidate.claim.clone());
        }
    }
    (go, again)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b42_a_nominated_node_is_not_empty() {
        // Pods that are held for a node count as pods on it.
        let candidate = |pods| Candidate {
            claim: "c".into(),
            pool: "p".into(),
            pods,
            quiet_since_ms: 0,
            protected: false,
            price: 1,
        };
        let rules = BTreeMap::from([("p".to_owned(), Rule { consolidate_after_ms: Some(0), allowed: 10 })]);
        assert_eq!(decide(&[candidate(1)], &rules, 1_000_000), (vec![], None));
        assert_eq!(decide(&[candidate(0)], &rules, 1_000_000).0, ["c"]);
    }

    #[test]
    fn an_empty_node_goes_after_its_quiet_time_within_the_budget() {
        let candidate = |claim: &str, pods, quiet_since_ms, price| Candidate {
            claim: claim.into(),
            pool: "p".into(),
            pods,
            quiet_since_ms,
            protected: false,
            price,
        };
        let rules = |after, allowed| BTreeMap::from([("p".to_owned(), Rule { consolidate_after_ms: after, allowed })]);
        let all = [
            candidate("cheap", 0, 0, 1),
            candidate("dear", 0, 0, 9),
            candidate("busy", 1, 0, 99),
            candidate("fresh", 0, 500, 5),
            Candidate { protected: true, ..candidate("guarded", 0, 0, 50) },
        ];
        assert_eq!(decide(&all, &rules(Some(600), 10), 700), (vec!["dear".into(), "cheap".into()], Some(1_100)));
        assert_eq!(decide(&all, &rules(Some(600), 1), 700).0, ["dear"]);
        assert_eq!(decide(&all, &rules(Some(600), 0), 700).0, Vec::<String>::new());
        assert_eq!(decide(&all, &rules(Some(600), 10), 599).0, Vec::<String>::new(), "not before its time");
        assert_eq!(decide(&all, &rules(None, 10), i64::MAX / 2), (vec![], None), "never is never");
    }
}
