//! Leases of the same purpose in other namespaces: another controller of the same NodeClaims, such as Karpenter in `kube-system`.
//!
//! A lease leads while its record changes: the clocks of other machines are not trusted. Only leases of namespaces whose pods may create NodeClaims
//! count, since many tenants may write leases in their own namespace.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, ResourceExt};

/// The name of Karpenter's Lease.
pub const KARPENTER_LEASE: &str = "karpenter-leader-election";
/// Karpenter's namespace by default, which no tenant may write to.
const SYSTEM: &str = "kube-system";
/// A lease that declares no duration, or a shorter one, is observed for this long before it counts as expired.
const LEAST: Duration = Duration::from_secs(15);
/// Longest duration that is believed.
const MOST: Duration = Duration::from_mins(2);
/// Longest name of a holder that is reported, in characters.
const HOLDER_CHARS: usize = 100;
/// How long an answer about a holder is used.
const ANSWER: Duration = Duration::from_mins(5);
/// Holders that are checked per look; the others wait for the next one.
const NEW_HOLDERS: usize = 8;
/// Running pods of a namespace that are read.
const PODS: u32 = 500;
/// Service accounts of a namespace that are checked.
const ACCOUNTS: usize = 50;
/// The status code of a request that the service may not make.
const FORBIDDEN: u16 = 403;
/// Concurrent requests about service accounts.
const CONCURRENCY: usize = 10;

/// Another controller that leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherLeader {
    /// `NAMESPACE/NAME`.
    pub lease: String,
    pub holder: String,
}

/// The result of a look at the leases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// No other controller leads.
    Alone,
    /// A lease is held, and it is not known yet whether its holder still renews it; or the leases could not be read.
    Unknown,
    /// Another controller leads.
    Leads(OtherLeader),
}

/// Namespace and name of a Lease.
type LeaseKey = (String, String);

/// The record of a lease, and since when it has been unchanged.
#[derive(Debug)]
struct Observed {
    holder: String,
    renewed: Option<Timestamp>,
    since: Instant,
    /// Whether the record changed while it was observed.
    changed: bool,
}

/// The leases as observed so far.
pub struct OtherLeaders {
    client: Client,
    /// Names of the leases that are looked for.
    names: BTreeSet<String>,
    /// This process's own lease, if it has one.
    own: Option<LeaseKey>,
    /// At least how long a record must be unchanged before it counts as expired.
    least: Duration,
    observed: BTreeMap<LeaseKey, Observed>,
    /// Whether the pods of a namespace may create NodeClaims, by namespace and holder, and when that was asked.
    entitled: BTreeMap<LeaseKey, (bool, Instant)>,
}

impl OtherLeaders {
    /// Looks for leases with this name and with that of Karpenter, in every namespace. `own` is the namespace of this process's own lease; `None`
    /// if it leads without one.
    pub fn new(client: Client, name: &str, own: Option<&str>) -> Self {
        let own = own.map(|namespace| (namespace.to_owned(), name.to_owned()));
        let names = BTreeSet::from([name.to_owned(), KARPENTER_LEASE.to_owned()]);
        Self { client, names, own, least: LEAST, observed: BTreeMap::new(), entitled: BTreeMap::new() }
    }

    /// Reads the leases. Without the right to read them it reports that no other controller leads: an upgrade whose roles are older goes on.
    pub async fn look(&mut self) -> Finding {
        let found = match self.held().await {
            Err(kube::Error::Api(status)) if status.code == FORBIDDEN => {
                let error = status.message;
                tracing::warn!(error, "not allowed to list leases, other leaders are not noticed");
                return Finding::Alone;
            }
            Err(error) => Err(error),
            Ok(held) => self.evaluate(held).await,
        };
        found.unwrap_or_else(|error| {
            tracing::warn!(%error, "failed to look for other leaders, retrying");
            Finding::Unknown
        })
    }

    /// The leases of others that have a holder.
    async fn held(&self) -> Result<BTreeMap<LeaseKey, (String, Lease)>, kube::Error> {
        let api: Api<Lease> = Api::all(self.client.clone());
        let mut held = BTreeMap::new();
        for name in &self.names {
            let leases = api.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?;
            for lease in leases.items.into_iter().filter(|lease| lease.name_any() == *name) {
                let key = (lease.namespace().unwrap_or_default(), lease.name_any());
                let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
                if self.own.as_ref() != Some(&key) && !holder.is_empty() {
                    held.insert(key, (holder, lease));
                }
            }
        }
        Ok(held)
    }

    async fn evaluate(&mut self, held: BTreeMap<LeaseKey, (String, Lease)>) -> Result<Finding, kube::Error> {
        let now = Instant::now();
        self.observed.retain(|key, _| held.contains_key(key));
        let holders: BTreeSet<(&str, &str)> = held.iter().map(|(key, (holder, _))| (&*key.0, &**holder)).collect();
        self.entitled.retain(|(namespace, holder), (_, asked)| {
            holders.contains(&(&**namespace, &**holder)) && now.duration_since(*asked) < ANSWER
        });
        let mut finding = Finding::Alone;
        let mut checks = NEW_HOLDERS;
        for (key, (holder, lease)) in held {
            let Some(leads) = self.observe(&key, &holder, &lease, now) else { continue };
            match self.is_entitled(&key.0, &holder, &mut checks, now).await? {
                Some(false) => {}
                Some(true) if leads => {
                    let holder = holder.chars().take(HOLDER_CHARS).collect();
                    return Ok(Finding::Leads(OtherLeader { lease: format!("{}/{}", key.0, key.1), holder }));
                }
                Some(true) | None => finding = Finding::Unknown,
            }
        }
        Ok(finding)
    }

    /// Records what a lease shows. `None` when its holder let it expire; otherwise whether the holder renewed it while it was observed.
    fn observe(&mut self, key: &LeaseKey, holder: &str, lease: &Lease, now: Instant) -> Option<bool> {
        let spec = lease.spec.as_ref()?;
        let renewed = spec.renew_time.as_ref().map(|time| time.0);
        let declared = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = Duration::from_secs(declared.unwrap_or(0)).min(MOST).max(self.least);
        let known = self.observed.get(key);
        if known.is_none_or(|known| known.holder != holder || known.renewed != renewed) {
            let seen = Observed { holder: holder.to_owned(), renewed, since: now, changed: known.is_some() };
            self.observed.insert(key.clone(), seen);
        }
        let seen = self.observed.get(key)?;
        (now.duration_since(seen.since) < duration).then_some(seen.changed)
    }

    /// Whether pods of a namespace may create NodeClaims; `None` where too many holders are new.
    async fn is_entitled(
        &mut self,
        namespace: &str,
        holder: &str,
        checks: &mut usize,
        now: Instant,
    ) -> Result<Option<bool>, kube::Error> {
        if namespace == SYSTEM {
            return Ok(Some(true));
        }
        let key = (namespace.to_owned(), holder.to_owned());
        if let Some((entitled, _)) = self.entitled.get(&key) {
            return Ok(Some(*entitled));
        }
        if *checks == 0 {
            return Ok(None);
        }
        *checks -= 1;
        let entitled = match may_create_claims(&self.client, namespace).await {
            // Two leaders are worse than none, which is visible.
            Err(kube::Error::Api(status)) if status.code == FORBIDDEN => true,
            answer => answer?,
        };
        self.entitled.insert(key, (entitled, now));
        Ok(Some(entitled))
    }
}

/// Whether a running pod of the namespace has a service account that may create NodeClaims.
async fn may_create_claims(client: &Client, namespace: &str) -> Result<bool, kube::Error> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let running = ListParams::default().fields("status.phase=Running").limit(PODS);
    let listed = pods.list(&running).await?;
    let accounts = listed.into_iter().filter_map(|pod| pod.spec?.service_account_name);
    let accounts: BTreeSet<String> = accounts.filter(|account| !account.is_empty()).collect();
    stream::iter(accounts.into_iter().take(ACCOUNTS))
        .map(|account| may_create(client, namespace, account))
        .buffer_unordered(CONCURRENCY)
        .try_fold(false, |any, may| async move { Ok(any || may) })
        .await
}

async fn may_create(client: &Client, namespace: &str, account: String) -> Result<bool, kube::Error> {
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(format!("system:serviceaccount:{namespace}:{account}")),
            groups: Some(vec![
                "system:serviceaccounts".to_owned(),
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated".to_owned(),
            ]),
            resource_attributes: Some(ResourceAttributes {
                group: Some("karpenter.sh".to_owned()),
                resource: Some("nodeclaims".to_owned()),
                verb: Some("create".to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let answer = Api::<SubjectAccessReview>::all(client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests;
