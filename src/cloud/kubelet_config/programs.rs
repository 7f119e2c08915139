//! Cache of parsed expressions, so that launches do not parse them again.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use stowage_runtime::sync::lock;

use crate::kubelet_config::expression::{Expression, ExpressionError};

/// How long an unused expression is cached, as in Karpenter.
const TTL: Duration = Duration::from_hours(12);
/// Maximum number of cached expressions: a cluster has a few node classes with a few expressions each.
const MAX_ENTRIES: usize = 512;

static PROGRAMS: LazyLock<Mutex<Programs>> = LazyLock::new(Mutex::default);

/// The parsed expression of a text.
///
/// # Errors
/// As [`Expression::parse`]. Failures are not cached.
pub fn program(text: &str) -> Result<Arc<Expression>, ExpressionError> {
    lock(&PROGRAMS).get(text, Instant::now())
}

#[derive(Debug, Default)]
struct Programs {
    /// By text, with the time of the last use.
    kept: HashMap<String, (Arc<Expression>, Instant)>,
}

impl Programs {
    fn get(&mut self, text: &str, now: Instant) -> Result<Arc<Expression>, ExpressionError> {
        if let Some((expression, used)) = self.kept.get_mut(text)
            && now.duration_since(*used) < TTL
        {
            *used = now;
            return Ok(Arc::clone(expression));
        }
        let expression = Arc::new(Expression::parse(text)?);
        self.kept.retain(|_, (_, used)| now.duration_since(*used) < TTL);
        if self.kept.len() >= MAX_ENTRIES {
            let oldest = self.kept.iter().min_by_key(|(_, (_, used))| *used).map(|(text, _)| text.clone());
            self.kept.retain(|text, _| oldest.as_ref() != Some(text));
        }
        self.kept.insert(text.to_owned(), (Arc::clone(&expression), now));
        Ok(expression)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c34_a_program_is_cached_for_twelve_hours_after_its_last_use() {
        let (mut programs, start) = (Programs::default(), Instant::now());
        let first = programs.get("vcpus", start).unwrap();
        let within = TTL.saturating_sub(Duration::from_secs(1));
        let soon = start + within;
        assert!(Arc::ptr_eq(&first, &programs.get("vcpus", soon).unwrap()));
        assert!(Arc::ptr_eq(&first, &programs.get("vcpus", soon + within).unwrap()), "sliding");
        let late = soon + TTL * 2;
        assert!(!Arc::ptr_eq(&first, &programs.get("vcpus", late).unwrap()));
        programs.get("max_pods", late + TTL).unwrap();
        assert_eq!(programs.kept.len(), 1, "the unused program expired");
    }

    #[test]
    fn c34_failures_are_not_cached_and_the_least_recently_used_is_evicted() {
        let (mut programs, start) = (Programs::default(), Instant::now());
        assert!(programs.get("vcpus *", start).is_err());
        assert!(programs.kept.is_empty());
        for number in 0..=MAX_ENTRIES {
            programs.get(&number.to_string(), start + Duration::from_secs(number as u64)).unwrap();
        }
        assert_eq!(programs.kept.len(), MAX_ENTRIES);
        assert!(!programs.kept.contains_key("0") && programs.kept.contains_key("1"));
    }
}
