//! Leader election by a Lease: the leader provisions and disrupts, every replica serves. No replica leads beside another controller of the same
//! NodeClaims ([`other_leaders`]).
//!
//! The election has a runtime of its own: a leader that is busy, or whose threads wait for CPU time, still renews its lease.

pub mod other_leader;
pub mod other_leaders;

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use prometheus::IntGauge;
use stowage_runtime::clock;
use stowage_runtime::telemetry::Metrics;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::controllers::leader::other_leaders::{Finding, OtherLeader, OtherLeaders};

/// The periods of the election.
#[derive(Clone, Copy, Debug)]
struct Timing {
    /// How often the lease is read.
    period: Duration,
    /// A lease that is not renewed for this long may be acquired by another replica.
    duration: Duration,
    /// A leader that could not renew its lease for this long stops leading.
    renew_deadline: Duration,
    /// Wait after a failed attempt to renew or release the lease.
    retry: Duration,
    /// How often a leader looks for other leaders. A lease whose state is unknown is read again after a period.
    look: Duration,
}

const TIMING: Timing = Timing {
    period: Duration::from_secs(2),
    duration: Duration::from_secs(15),
    renew_deadline: Duration::from_secs(10),
    retry: Duration::from_millis(500),
    look: Duration::from_secs(10),
};
/// Attempts to release the lease: the shutdown allows five seconds.
const RELEASE_ATTEMPTS: usize = 3;

/// Result of an attempt to acquire or renew the lease.
enum ElectionOutcome {
    /// This candidate holds the lease.
    Leading,
    /// Another candidate holds the lease.
    Following,
    /// Another candidate wrote the lease between the read and the write.
    Conflict,
}

/// A candidate for the lease.
#[derive(Clone)]
pub struct LeaderCandidate {
    client: Client,
    /// Namespace of the lease; `None` for a process that leads without a lease.
    namespace: Option<String>,
    /// Where the requests run.
    runtime: Handle,
    name: String,
    identity: String,
    timing: Timing,
    /// Transitions of the lease, as last read.
    transitions: IntGauge,
    /// Holder and renewal time of the last record, and when that record was first observed by the local clock: the clocks of other
    /// machines are not trusted.
    observed: Option<(Option<String>, Option<Timestamp>, Instant)>,
    /// The lease as this candidate last wrote it, unless an attempt failed since then.
    held: Option<Lease>,
    /// The other leader that this candidate waits for.
    other: Arc<watch::Sender<Option<OtherLeader>>>,
    /// 1 while it waits for one.
    has_other: IntGauge,
}

impl LeaderCandidate {
    /// A candidate with this identity for the Lease `namespace/name`, whose requests run on the current runtime. It must be that of `client`. Without
    /// a namespace the candidate needs no lease.
    ///
    /// # Panics
    /// Outside of a runtime.
    pub fn new(client: Client, namespace: Option<String>, name: &str, identity: String, metrics: &Metrics) -> Self {
        Self {
            client,
            namespace,
            runtime: Handle::current(),
            name: name.to_owned(),
            identity,
            timing: TIMING,
            transitions: metrics.lease_transitions.clone(),
            observed: None,
            held: None,
            other: Arc::default(),
            has_other: metrics.other_leader.clone(),
        }
    }

    /// The other leader that this candidate waits for.
    pub fn other(&self) -> watch::Receiver<Option<OtherLeader>> {
        self.other.subscribe()
    }

    /// Waits until this candidate holds the lease and no other controller leads.
    pub async fn acquire(&self) {
        self.run(|mut own| async move { own.acquire_here().await }).await;
    }

    /// Renews the lease until it is lost or another controller leads; returns why.
    pub async fn renew(&self) -> String {
        self.run(|mut own| async move { own.renew_here().await }).await
    }

    /// Releases the lease, so that the next leader need not wait for its expiry.
    pub async fn release(&self) {
        self.run(|own| async move { own.release_with_retries().await }).await;
    }

    /// Runs a copy of this candidate on its runtime, until the returned future is dropped.
    async fn run<T: Send + 'static, F: Future<Output = T> + Send + 'static>(&self, part: impl FnOnce(Self) -> F) -> T {
        let mut tasks = JoinSet::new();
        tasks.spawn_on(part(self.clone()), &self.runtime);
        match tasks.join_next().await {
            Some(Ok(done)) => done,
            Some(Err(ended)) if ended.is_panic() => resume_unwind(ended.into_panic()),
            // The election runtime outlives all other tasks.
            Some(Err(_)) | None => std::future::pending().await,
        }
    }

    async fn acquire_here(&mut self) {
        let mut others = self.others();
        loop {
            if self.is_alone(&mut others).await {
                match self.attempt().await {
                    // Of two candidates that looked before the other's write, at least one sees the other now.
                    Ok(ElectionOutcome::Leading) if self.is_alone(&mut others).await => return,
                    Ok(ElectionOutcome::Leading) => {
                        self.release_with_retries().await;
                        tokio::time::sleep(self.timing.period.mul_f64(fastrand::f64())).await;
                    }
                    Ok(ElectionOutcome::Following | ElectionOutcome::Conflict) => {}
                    Err(error) => tracing::warn!(lease = self.name, %error, "failed to acquire lease, retrying"),
                }
            } else if let Err(error) = self.read().await {
                // The lease of an earlier replica expires meanwhile.
                tracing::warn!(lease = self.name, %error, "failed to read lease, retrying");
            }
            tokio::time::sleep(self.timing.period).await;
        }
    }

    /// Looks for other leaders, and publishes the one that this candidate waits for.
    async fn is_alone(&self, others: &mut OtherLeaders) -> bool {
        let finding = others.look().await;
        let leads = match &finding {
            Finding::Leads(other) => Some(other.clone()),
            Finding::Alone => None,
            // A leader remains one until its lease is known to have expired.
            Finding::Unknown => return false,
        };
        self.has_other.set(leads.is_some().into());
        self.other.send_if_modified(|known| std::mem::replace(known, leads.clone()) != leads);
        finding == Finding::Alone
    }

    fn others(&self) -> OtherLeaders {
        OtherLeaders::new(self.client.clone(), &self.name, self.namespace.as_deref())
    }

    /// Renews the lease, and looks for other leaders beside it: a slow response delays no renewal.
    async fn renew_here(&mut self) -> String {
        let others = self.watch_others();
        tokio::select! {
            why = self.renew_until_lost() => why.into(),
            other = others => format!("{} leads, too, with the lease {}", other.holder, other.lease),
        }
    }

    /// Looks for other leaders until there is one.
    fn watch_others(&self) -> impl Future<Output = OtherLeader> + Send + 'static {
        let (mut others, Timing { period, look, .. }) = (self.others(), self.timing);
        async move {
            let mut wait = look;
            loop {
                tokio::time::sleep(wait).await;
                wait = match others.look().await {
                    Finding::Leads(other) => return other,
                    Finding::Alone => look,
                    Finding::Unknown => period,
                };
            }
        }
    }

    async fn renew_until_lost(&mut self) -> &'static str {
        let Timing { period, renew_deadline, retry, .. } = self.timing;
        let (mut renewed, mut wait) = (Instant::now(), period);
        while renewed.elapsed() < renew_deadline {
            tokio::time::sleep(wait).await;
            wait = retry;
            let left = renew_deadline.saturating_sub(renewed.elapsed()).min(renew_deadline / 2);
            let started = Instant::now();
            match tokio::time::timeout(left, self.attempt()).await {
                Ok(Ok(ElectionOutcome::Leading)) => (renewed, wait) = (started, period),
                Ok(Ok(ElectionOutcome::Conflict)) => {}
                Ok(Ok(ElectionOutcome::Following)) => return "another replica leads now",
                Ok(Err(error)) => tracing::warn!(lease = self.name, %error, "failed to renew lease, retrying"),
                Err(_) => tracing::warn!(lease = self.name, "lease renewal timed out, retrying"),
            }
        }
        "no renewal succeeded for ten seconds"
    }

    async fn release_with_retries(&self) {
        for _ in 0..RELEASE_ATTEMPTS {
            match self.try_release().await {
                Ok(()) => return,
                Err(error) => tracing::debug!(%error, "failed to release lease"),
            }
            tokio::time::sleep(self.timing.retry).await;
        }
    }

    async fn try_release(&self) -> Result<(), kube::Error> {
        let Some(api) = self.leases() else { return Ok(()) };
        let Some(mut lease) = api.get_opt(&self.name).await? else { return Ok(()) };
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if spec.holder_identity.as_deref() == Some(&self.identity) {
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
            api.replace(&self.name, &PostParams::default(), &lease).await?;
            tracing::info!(lease = self.name, "released lease");
        }
        Ok(())
    }

    /// Leases of the namespace of this candidate's lease.
    fn leases(&self) -> Option<Api<Lease>> {
        self.namespace.as_deref().map(|namespace| Api::namespaced(self.client.clone(), namespace))
    }

    /// Reads the lease, and records since when it is unchanged.
    async fn read(&mut self) -> Result<Option<Lease>, kube::Error> {
        let Some(api) = self.leases() else { return Ok(None) };
        let lease = api.get_opt(&self.name).await?;
        if let Some(spec) = lease.as_ref().map(|lease| lease.spec.clone().unwrap_or_default()) {
            self.transitions.set(spec.lease_transitions.unwrap_or(0).into());
            let record = (spec.holder_identity, spec.renew_time.map(|time| time.0));
            if self.observed.as_ref().is_none_or(|(holder, renewed, _)| (holder, renewed) != (&record.0, &record.1)) {
                self.observed = Some((record.0, record.1, Instant::now()));
            }
        }
        Ok(lease)
    }

    /// Writes the lease if it is held by this candidate, free, or expired. A lease that this candidate wrote last is not read before: a write
    /// of another candidate makes the renewal conflict, and the next attempt reads it.
    async fn attempt(&mut self) -> Result<ElectionOutcome, kube::Error> {
        let Some(api) = self.leases() else { return Ok(ElectionOutcome::Leading) };
        let known = match self.held.take() {
            Some(held) => Some(held),
            None => self.read().await?,
        };
        let Some(mut lease) = known else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                spec: Some(self.spec(0)),
            };
            let created = api.create(&PostParams::default(), &lease).await;
            return self.written(created);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let ours = spec.holder_identity.as_deref() == Some(&self.identity);
        let free = spec.holder_identity.as_deref().is_none_or(str::is_empty);
        let expired = self.observed.as_ref().is_some_and(|(_, _, since)| since.elapsed() >= self.timing.duration);
        if !(ours || free || expired) {
            return Ok(ElectionOutcome::Following);
        }
        let transitions = spec.lease_transitions.unwrap_or(0) + i32::from(!ours);
        let mut next = self.spec(transitions);
        if ours {
            next.acquire_time = spec.acquire_time;
        }
        lease.spec = Some(next);
        // The resource version makes the write conflict if another candidate wrote meanwhile.
        let replaced = api.replace(&self.name, &PostParams::default(), &lease).await;
        self.written(replaced)
    }

    /// The outcome of a write, and what is held after it.
    fn written(&mut self, written: Result<Lease, kube::Error>) -> Result<ElectionOutcome, kube::Error> {
        match written {
            Ok(lease) => {
                self.held = Some(lease);
                Ok(ElectionOutcome::Leading)
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(ElectionOutcome::Conflict),
            Err(error) => Err(error),
        }
    }

    fn spec(&self, transitions: i32) -> LeaseSpec {
        let now = MicroTime(clock::timestamp());
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.timing.duration.as_secs()).ok(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}

#[cfg(test)]
mod write_tests;
