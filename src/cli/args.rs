//! Flags, and parsers of flag values, that several subcommands share.

use std::time::Duration;

use clap::Args;
use stowage_api::duration;

use crate::controllers::leader::other_leaders::KARPENTER_LEASE;

/// The Lease of the leader election.
#[derive(Args, Clone, Debug)]
pub struct LeaseArgs {
    /// Name of the leader-election Lease; Karpenter's own by default, so that only one of the two provisions.
    #[arg(long, env = "LEADER_ELECTION_NAME", default_value = KARPENTER_LEASE)]
    pub leader_election_name: String,
    /// Namespace of the Lease [default: the pod's namespace].
    #[arg(long, env = "LEADER_ELECTION_NAMESPACE", default_value = "")]
    pub leader_election_namespace: String,
}

impl LeaseArgs {
    /// The namespace, where a pod or a kubeconfig has this default.
    pub(crate) fn namespace(&self, default: &str) -> String {
        let chosen = self.leader_election_namespace.as_str();
        if chosen.is_empty() { default.to_owned() } else { chosen.to_owned() }
    }
}

/// A boolean in the spellings of Go's `strconv.ParseBool`, as Karpenter accepts it.
pub(crate) fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("expected a boolean: true, false, 1, 0, t or f".into()),
    }
}

/// A duration such as 500ms, 10s or 1m30s.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let expected = "expected a duration such as 500ms, 10s or 1m30s";
    let milliseconds = match text.strip_suffix("ms").map(str::parse::<i64>) {
        Some(parsed) => parsed.map_err(|_| expected.to_owned())?,
        None => duration::parse(text).map_err(|error| format!("{error}; {expected}"))?,
    };
    u64::try_from(milliseconds).map(Duration::from_millis).map_err(|_| expected.to_owned())
}
