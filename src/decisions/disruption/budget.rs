//! Disruption budgets: how many nodes of a pool may be disrupted now (Karpenter core reference 4.4).

use croner::Cron;
use k8s_openapi::jiff::{Timestamp, tz::TimeZone};
use stowage_api::duration;
use stowage_api::node_pool::Budget;
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::reason::DisruptionReason;

/// Nodes of a pool that may be disrupted for `reason` at `now`: the minimum over the active budgets, given `nodes` initialized
/// nodes, less the `consuming` nodes that are leaving or not ready. Unbounded without a budget; 0 with an invalid one.
pub fn allowed(budgets: &[Budget], reason: DisruptionReason, nodes: i64, consuming: i64, now: UnixMillis) -> i64 {
    let (mut least, reason) = (i64::MAX, reason.of_budget().as_str());
    for budget in budgets {
        let Ok(active) = is_active(budget, now) else { return 0 };
        let reasons = budget.reasons.as_ref();
        let applies = reasons.is_none_or(|reasons| reasons.iter().any(|other| other == reason));
        if active && applies {
            least = least.min(bound(&budget.nodes, nodes));
        }
    }
    if least == i64::MAX { i64::MAX } else { (least - consuming).max(0) }
}

/// Whether a budget is active: always without a schedule, else for its duration after each hit of the schedule, in UTC.
fn is_active(budget: &Budget, now: UnixMillis) -> Result<bool, String> {
    let (Some(schedule), Some(length)) = (&budget.schedule, &budget.duration) else {
        return Ok(true);
    };
    let length = duration::parse(length).map_err(|error| error.to_string())?;
    let cron: Cron = schedule.parse().map_err(|error: croner::errors::CronError| error.to_string())?;
    let start = Timestamp::from_millisecond(now.0 - length).map_err(|error| error.to_string())?;
    let hit = cron.find_next_occurrence(&start.to_zoned(TimeZone::UTC), false).map_err(|error| error.to_string())?;
    Ok(hit.timestamp().as_millisecond() <= now.0)
}

/// The number of nodes that `text`, a count or a percentage of `nodes`, allows; percentages round up.
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
    fn percentages_round_up_and_the_smallest_budget_counts() {
        let budget = |nodes: &str, reasons: Option<&[&str]>| Budget {
            nodes: nodes.into(),
            reasons: reasons.map(|reasons| reasons.iter().map(ToString::to_string).collect()),
            ..Budget::default()
        };
        for (case, budgets, nodes, consuming, expected) in [
            ("10 % of 10", vec![budget("10%", None)], 10, 0, 1),
            ("10 % of 5 rounds up", vec![budget("10%", None)], 5, 0, 1),
            ("10 % of 19 with one not ready", vec![budget("10%", None)], 19, 1, 1),
            ("zero blocks", vec![budget("0", None)], 10, 0, 0),
            ("the smallest counts", vec![budget("50%", None), budget("2", None)], 10, 0, 2),
            ("another reason's budget", vec![budget("0", Some(&["Drifted"])), budget("3", None)], 10, 0, 3),
            ("unreadable", vec![budget("many", None)], 10, 0, 0),
            ("none", vec![], 10, 0, i64::MAX),
        ] {
            assert_eq!(allowed(&budgets, DisruptionReason::Empty, nodes, consuming, UnixMillis(0)), expected, "{case}");
        }
        let scheduled = |schedule: &str| Budget {
            schedule: Some(schedule.into()),
            duration: Some("1h".into()),
            ..budget("5", None)
        };
        let allowed =
            |schedule: &str| allowed(&[scheduled(schedule)], DisruptionReason::Empty, 10, 0, UnixMillis(7_200_001));
        assert_eq!(allowed("0 2 1 1 *"), 5, "at two on the first of January");
        assert_eq!(allowed("0 5 1 1 *"), i64::MAX, "outside its schedule");
        assert_eq!(allowed("whenever"), 0, "invalid");
    }

    #[test]
    fn budgets_for_drift_and_for_every_reason_apply_to_expiration() {
        let budget =
            |reason: &str| Budget { nodes: "3".into(), reasons: Some(vec![reason.to_owned()]), ..Budget::default() };
        for (budget, expected) in [
            (budget("Drifted"), 3),
            (budget("Underutilized"), i64::MAX),
            (Budget { reasons: None, ..budget("Drifted") }, 3),
        ] {
            let reasons = budget.reasons.clone();
            let found = allowed(&[budget], DisruptionReason::Expired, 10, 0, UnixMillis(0));
            assert_eq!(found, expected, "{reasons:?}");
        }
    }

    #[test]
    fn a_scheduled_budget_is_active_in_its_window_only() {
        let budget = Budget {
            nodes: "0".into(),
            schedule: Some("0 9 * * mon-fri".into()),
            duration: Some("8h".into()),
            ..Budget::default()
        };
        let at = |text: &str| UnixMillis::parse_rfc3339(text).unwrap();
        // 2026-11-20 is a Friday.
        assert_eq!(is_active(&budget, at("2026-11-20T08:59:59Z")), Ok(false));
        assert_eq!(is_active(&budget, at("2026-11-20T09:00:00Z")), Ok(true));
        assert_eq!(is_active(&budget, at("2026-11-20T16:59:59Z")), Ok(true));
        assert_eq!(is_active(&budget, at("2026-11-20T17:00:01Z")), Ok(false));
        assert_eq!(is_active(&budget, at("2026-11-21T10:00:00Z")), Ok(false), "a Saturday");
        assert!(is_active(&Budget { schedule: Some("whenever".into()), ..budget }, UnixMillis(0)).is_err());
    }
}
