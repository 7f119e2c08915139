//! Client-side rate limit: a token bucket for each kind of EC2 call, for every attempt including retries.
//!
//! EC2 throttles by account and region with its own token buckets; a delayed call costs less than a throttled one. Pure: time is an
//! argument, and a bucket returns the time to wait.

use std::time::Duration;

use stowage_model::time::UnixMillis;

/// Calls that share a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Describe,
    /// CreateFleet, CreateLaunchTemplate and DeleteLaunchTemplate.
    Launch,
    /// RunInstances, which is called for dry runs only.
    DryRun,
    Terminate,
    /// CreateTags.
    Tag,
}

/// The kind of an EC2 action; `None` for an action without a limit.
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

/// The action in the body of a request in EC2's query protocol.
pub fn action(body: &[u8]) -> Option<&str> {
    let rest = body.strip_prefix(b"Action=")?;
    let end = rest.iter().position(|byte| *byte == b'&').unwrap_or(rest.len());
    std::str::from_utf8(&rest[..end]).ok()
}

/// A token bucket. It counts thousandths of a token, so that rounding loses no token between frequent calls.
#[derive(Clone, Debug)]
struct Bucket {
    per_second: i64,
    burst: i64,
    /// Thousandths of a token; negative while callers wait.
    milli: i64,
    filled_at: UnixMillis,
}

impl Bucket {
    fn new(per_second: i64, burst: i64) -> Self {
        Self { per_second, burst, milli: burst * 1000, filled_at: UnixMillis::MIN }
    }

    /// Reserves a token at `now` and returns the time until it is available. Later callers wait longer.
    fn take(&mut self, now: UnixMillis) -> Duration {
        let elapsed = now.saturating_since(self.filled_at.max(UnixMillis(0))).as_millis();
        // One token per second is one thousandth per millisecond.
        let gained = i64::try_from(elapsed).unwrap_or(i64::MAX).saturating_mul(self.per_second);
        self.milli = self.milli.saturating_add(gained).min(self.burst * 1000);
        self.filled_at = now.max(self.filled_at);
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
    /// Calls per second and burst of the fake EC2 in Karpenter's tests: reads 20 and 100, launches 5 and 50, dry runs 2 and 5,
    /// terminations 5 and 100, tags 10 and 100.
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
    /// Reserves a call of a kind at `now` and returns the time to wait before it is made.
    pub fn take(&mut self, kind: Kind, now: UnixMillis) -> Duration {
        let bucket = match kind {
            Kind::Describe => &mut self.describe,
            Kind::Launch => &mut self.launch,
            Kind::DryRun => &mut self.dry_run,
            Kind::Terminate => &mut self.terminate,
            Kind::Tag => &mut self.tag,
        };
        bucket.take(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_beyond_the_burst_wait_for_their_tokens() {
        let mut limits = Limits::default();
        for _ in 0..50 {
            assert_eq!(limits.take(Kind::Launch, UnixMillis(1_000)), Duration::ZERO);
        }
        assert_eq!(limits.take(Kind::Launch, UnixMillis(1_000)), Duration::from_millis(200));
        assert_eq!(limits.take(Kind::Launch, UnixMillis(1_000)), Duration::from_millis(400));
        assert_eq!(limits.take(Kind::Describe, UnixMillis(1_000)), Duration::ZERO, "other kinds have their own bucket");
        assert_eq!(
            limits.take(Kind::Launch, UnixMillis(1_600)),
            Duration::ZERO,
            "600 ms refill three tokens, two of which are reserved"
        );
    }

    #[test]
    fn a_bucket_is_capped_at_its_burst_and_gains_nothing_when_the_clock_steps_back() {
        let mut limits = Limits::default();
        for _ in 0..6 {
            limits.take(Kind::DryRun, UnixMillis(0));
        }
        assert_eq!(limits.take(Kind::DryRun, UnixMillis(3_600_000)), Duration::ZERO);
        for _ in 0..4 {
            assert_eq!(limits.take(Kind::DryRun, UnixMillis(3_600_000)), Duration::ZERO);
        }
        assert_eq!(limits.take(Kind::DryRun, UnixMillis(10)), Duration::from_millis(500));
    }

    #[test]
    fn the_action_is_parsed_from_the_body() {
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
