//! Check of the leader election: no other controller of the same NodeClaims leads.

use std::collections::BTreeSet;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};

use crate::ec2::preflight::finding::Finding;

const CHECK: &str = "leader election";
/// A lease that was renewed within this time, by the clock of this machine, is taken for one that is held.
const RECENT_SECONDS: i64 = 60;

/// Lists the leases with one of the names.
///
/// # Errors
/// The API server's message.
pub async fn fetch(client: &Client, names: &BTreeSet<String>) -> Result<Vec<Lease>, kube::Error> {
    let api: Api<Lease> = Api::all(client.clone());
    let mut leases = Vec::new();
    for name in names {
        leases.extend(api.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?.items);
    }
    Ok(leases)
}

/// The finding about the leases, where `own` is `NAMESPACE/NAME` of Stowage's lease.
pub fn finding(own: &str, leases: &Result<Vec<Lease>, kube::Error>, now: Timestamp) -> Finding {
    let leases = match leases {
        Ok(leases) => leases,
        Err(error) => {
            let detail = format!("not checked whether another controller leads: {error}");
            return Finding::warning(CHECK, detail, "run the check with the right to list leases".to_owned());
        }
    };
    let held = |lease: &&Lease| {
        let spec = lease.spec.as_ref();
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        let renewed = spec.and_then(|spec| spec.renew_time.as_ref());
        !holder.is_empty() && renewed.is_some_and(|at| now.as_second() - at.0.as_second() < RECENT_SECONDS)
    };
    let name = |lease: &Lease| format!("{}/{}", lease.namespace().unwrap_or_default(), lease.name_any());
    let others: Vec<String> = leases.iter().filter(held).map(name).filter(|name| name != own).collect();
    if others.is_empty() {
        return Finding::ok(CHECK, format!("no controller leads with another lease than {own}"));
    }
    let detail =
        format!("another controller leads with the lease {}; Stowage waits until it expires", others.join(", "));
    let help = "stop that controller, or share its lease with LEADER_ELECTION_NAMESPACE (settings.leaderElection)";
    Finding::warning(CHECK, detail, help.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_lease_of_another_namespace_that_was_renewed_is_reported() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        let lease = |namespace: &str, holder: &str, second: u32| -> Lease {
            serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": "karpenter-leader-election"},
                "spec": {"holderIdentity": holder, "renewTime": format!("2026-01-01T00:00:{second:02}.000000Z")}}))
            .unwrap()
        };
        let own = "stowage/karpenter-leader-election";
        let of = |leases: Vec<Lease>| {
            let finding = finding(own, &Ok(leases), now);
            format!("{} {} {}", finding.result.as_str(), finding.detail, finding.fix)
        };
        let alone = of(vec![]);
        assert_eq!(alone, format!("ok no controller leads with another lease than {own} "));
        let expired = lease("kube-system", "h", 0);
        assert_eq!(of(vec![lease("stowage", "h", 50), expired, lease("other", "", 50)]), alone);
        insta::assert_snapshot!(of(vec![lease("kube-system", "h", 50), lease("b", "h", 50)]), @"warning another controller leads with the lease kube-system/karpenter-leader-election, b/karpenter-leader-election; Stowage waits until it expires stop that controller, or share its lease with LEADER_ELECTION_NAMESPACE (settings.leaderElection)");
        let refused = kube::Error::Api(Box::new(kube::core::Status::failure("no", "Forbidden").with_code(403)));
        assert_eq!(finding(own, &Err(refused), now).result.as_str(), "warning");
    }
}
