//! The client's own rate limit: one token bucket for each kind of EC2 call, asked before every attempt, retries included.
//!
//! EC2 throttles by account and region with buckets of its own; staying under them costs less than being refused. Pure: time
//! comes in as an argument, and a bucket says how long to wait instead of waiting.

use std::time::Duration;

/// Calls that share a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Reads.
    Describe,
    /// CreateFleet and the writes of launch templates.
    Launch,
    /// RunInstances, which is only ever a dry run.
    DryRun,
    /// TerminateInstances.
    Terminate,
    /// CreateTags.
    Tag,
}

/// The kind of an EC2 action; `None` for one that isn't limited here.
pub fn kind(action: &str) -> Option<Kind> {
    match action {
        "CreateFleet" | "CreateLaunchTemplate" | "DeleteLaunchTemplate" => Some(Kind::Launch),
        "RunInstances" => Some(Kind::DryRun),
        "TerminateInstances" => Some(Kind::Terminate),
        "CreateTags" => Some(Kind::Tag),
        action if action.starts_with("Describe") => Some(Kind::Describe),
        _ => None,
    }
}

/// The action of a request in EC2's query protocol, read off its body.
pub fn action(body: &[u8]) -> Option<&str> {
    let rest = body.strip_prefix(b"Action=")?;
    let end = rest.iter().position(|byte| *byte == b'&').unwrap_or(rest.len());
    std::str::from_utf8(&rest[..end]).ok()
}

/// A token bucket. Tokens are thousandths, so that nothing is lost between two calls close together.
#[derive(Clone, Debug)]
struct Bucket {
    per_second: i64,
    burst: i64,
    milli: i64,
    at_ms: i64,
}

impl Bucket {
    fn new(per_second: i64, burst: i64) -> Self {
        Self { per_second, burst, milli: burst * 1000, at_ms: i64::MIN }
    }

    /// Takes a token at `now_ms`. Returns how long to wait until it is there; later callers wait behind.
    fn take(&mut self, now_ms: i64) -> Duration {
        let elapsed = now_ms.saturating_sub(self.at_ms.max(0)).max(0);
        self.milli = self.milli.saturating_add(elapsed.saturating_mul(self.per_second)).min(self.burst * 1000);
        self.at_ms = now_ms.max(self.at_ms);
        self.milli -= 1000;
        let short = -self.milli;
        let wait = if short <= 0 { 0 } else { (short + self.per_second - 1) / self.per_second };
        Duration::from_millis(u64::try_from(wait).unwrap_or(0))
    }
}

/// The buckets of one account and region.
#[derive(Clone, Debug)]
pub struct Limits {
    describe: Bucket,
    launch: Bucket,
    dry_run: Bucket,
    terminate: Bucket,
    tag: Bucket,
}

impl Default for Limits {
    /// Calls a second and burst as Karpenter's own stand-in for EC2 has them: reads 20 and 100, launches 5 and 50, dry runs 2 and
    /// 5, terminations 5 and 100, tags 10 and 100.
    fn default() -> Self {
        Self {
            describe: Bucket::new(20, 100),
            launch: Bucket::new(5, 50),
            dry_run: Bucket::new(2, 5),
            terminate: Bucket::new(5, 100),
            tag: Bucket::new(10, 100),
        }
    }
}

impl Limits {
    /// Reserves a call of a kind at `now_ms`. Returns how long to wait before it is made.
    pub fn take(&mut self, kind: Kind, now_ms: i64) -> Duration {
        let bucket = match kind {
            Kind::Describe => &mut self.describe,
            Kind::Launch => &mut self.launch,
            Kind::DryRun => &mut self.dry_run,
            Kind::Terminate => &mut self.terminate,
            Kind::Tag => &mut self.tag,
        };
        bucket.take(now_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_goes_through_and_what_follows_waits_its_turn() {
        let mut limits = Limits::default();
        for _ in 0..50 {
            assert_eq!(limits.take(Kind::Launch, 1_000), Duration::ZERO);
        }
        assert_eq!(limits.take(Kind::Launch, 1_000), Duration::from_millis(200));
        assert_eq!(limits.take(Kind::Launch, 1_000), Duration::from_millis(400));
        assert_eq!(limits.take(Kind::Describe, 1_000), Duration::ZERO, "other kinds have their own");
        assert_eq!(limits.take(Kind::Launch, 1_600), Duration::ZERO, "three tokens came in 600 ms, two were owed");
    }

    #[test]
    fn an_idle_bucket_never_holds_more_than_its_burst_and_a_clock_that_steps_back_gives_nothing() {
        let mut limits = Limits::default();
        for _ in 0..6 {
            limits.take(Kind::DryRun, 0);
        }
        assert_eq!(limits.take(Kind::DryRun, 3_600_000), Duration::ZERO);
        for _ in 0..4 {
            assert_eq!(limits.take(Kind::DryRun, 3_600_000), Duration::ZERO);
        }
        assert_eq!(limits.take(Kind::DryRun, 10), Duration::from_millis(500));
    }

    #[test]
    fn the_action_is_read_off_the_body() {
        for (body, expected) in [
            ("Action=CreateFleet&Version=2016-11-15", Some("CreateFleet")),
            ("Action=DescribeVpcs", Some("DescribeVpcs")),
            ("{\"Name\": \"x\"}", None),
            ("", None),
        ] {
            assert_eq!(action(body.as_bytes()), expected);
        }
        assert_eq!(kind("DeleteLaunchTemplate"), Some(Kind::Launch));
        assert_eq!(kind("DescribeInstances"), Some(Kind::Describe));
        assert_eq!(kind("GetParameter"), None);
    }
}
