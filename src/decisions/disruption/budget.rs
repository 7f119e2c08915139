//! How many nodes of a pool may be disrupted now (core reference section 4.4).

use crate::api::node_pool::Budget;

/// Nodes of a pool that may be disrupted now for `reason`: the least that any active budget allows of `nodes` managed and
/// initialized nodes, less the `consuming` ones that are being disrupted or not ready. No budget, no bound.
///
/// A budget with a schedule counts only while `active` says so; a budget that can't be read allows nothing.
pub fn allowed(
    budgets: &[Budget],
    reason: &str,
    nodes: i64,
    consuming: i64,
    active: impl Fn(&Budget) -> Result<bool, String>,
) -> i64 {
    let mut least = i64::MAX;
    for budget in budgets {
        let Ok(active) = active(budget) else { return 0 };
        let applies = budget.reasons.as_ref().is_none_or(|reasons| reasons.iter().any(|other| other == reason));
        if active && applies {
            least = least.min(bound(&budget.nodes, nodes));
        }
    }
    if least == i64::MAX { i64::MAX } else { (least - consuming).max(0) }
}

/// What a budget's text allows of so many nodes; percentages round up.
fn bound(text: &str, nodes: i64) -> i64 {
    match text.strip_suffix('%') {
        Some(percent) => percent.parse::<i64>().map_or(0, |percent| (nodes * percent + 99) / 100),
        None => text.parse().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_round_up_and_the_least_budget_counts() {
        let budget = |nodes: &str, reasons: Option<&[&str]>| Budget {
            nodes: nodes.into(),
            reasons: reasons.map(|reasons| reasons.iter().map(ToString::to_string).collect()),
            ..Budget::default()
        };
        let always = |_: &Budget| Ok(true);
        for (case, budgets, nodes, consuming, expected) in [
            ("10 % of 10", vec![budget("10%", None)], 10, 0, 1),
            ("10 % of 5 rounds up", vec![budget("10%", None)], 5, 0, 1),
            ("10 % of 19 with one not ready", vec![budget("10%", None)], 19, 1, 1),
            ("zero blocks", vec![budget("0", None)], 10, 0, 0),
            ("the least counts", vec![budget("50%", None), budget("2", None)], 10, 0, 2),
            ("another reason's budget", vec![budget("0", Some(&["Drifted"])), budget("3", None)], 10, 0, 3),
            ("unreadable", vec![budget("many", None)], 10, 0, 0),
            ("none", vec![], 10, 0, i64::MAX),
        ] {
            assert_eq!(allowed(&budgets, "Empty", nodes, consuming, always), expected, "{case}");
        }
        assert_eq!(allowed(&[budget("0", None)], "Empty", 10, 0, |_| Ok(false)), i64::MAX, "outside its schedule");
        assert_eq!(allowed(&[budget("5", None)], "Empty", 10, 0, |_| Err("bad cron".into())), 0);
    }
}
