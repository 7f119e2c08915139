//! One leader by a Lease: it provisions and disrupts; every replica serves.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};

/// A lease that isn't renewed for so long is anybody's.
const DURATION: Duration = Duration::from_secs(15);
/// The leader stops leading when it could not renew for so long.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// How often giving the lease back is tried, and the wait in between: what ends the process waits for five seconds.
const RELEASES: usize = 3;
const RELEASE_PAUSE: Duration = Duration::from_millis(500);
/// How often the lease is looked at.
const PERIOD: Duration = Duration::from_secs(2);

/// What came of a look at the Lease.
enum Outcome {
    /// It is this candidate's.
    Leads,
    /// It is another's.
    Follows,
    /// Somebody wrote between the look and the write: the next look tells who.
    Overtaken,
}

/// A claim on the Lease.
pub struct Candidate {
    api: Api<Lease>,
    name: String,
    identity: String,
    /// The record seen last and when it changed by our own clock: other machines' clocks aren't trusted.
    seen: Option<(Option<String>, Option<Timestamp>, Instant)>,
}

impl Candidate {
    /// A candidate of this identity for the Lease `namespace/name`.
    pub fn new(client: Client, namespace: &str, name: &str, identity: String) -> Self {
        Self { api: Api::namespaced(client, namespace), name: name.to_owned(), identity, seen: None }
    }

    /// Waits until this candidate leads.
    pub async fn acquire(&mut self) {
        loop {
            match self.attempt().await {
                Ok(Outcome::Leads) => return,
                Ok(Outcome::Follows | Outcome::Overtaken) => {}
                Err(error) => tracing::warn!(lease = self.name, %error, "lease could not be had, trying again"),
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Keeps the lease; returns why it is lost.
    pub async fn keep(&mut self) -> &'static str {
        let mut renewed = Instant::now();
        while renewed.elapsed() < RENEW_DEADLINE {
            tokio::time::sleep(PERIOD).await;
            let left = RENEW_DEADLINE.saturating_sub(renewed.elapsed()).min(RENEW_DEADLINE / 2);
            let asked = Instant::now();
            match tokio::time::timeout(left, self.attempt()).await {
                Ok(Ok(Outcome::Leads)) => renewed = asked,
                Ok(Ok(Outcome::Overtaken)) => {}
                Ok(Ok(Outcome::Follows)) => return "another replica leads now",
                Ok(Err(error)) => tracing::warn!(lease = self.name, %error, "lease could not be renewed, trying again"),
                Err(_) => tracing::warn!(lease = self.name, "renewing the lease took too long, trying again"),
            }
        }
        "the API server took no renewal for ten seconds"
    }

    /// Gives the lease back, so that the next leader need not wait for it to run out.
    pub async fn release(&mut self) {
        for _ in 0..RELEASES {
            match self.give_back().await {
                Ok(()) => return,
                Err(error) => tracing::debug!(%error, "lease could not be given back"),
            }
            tokio::time::sleep(RELEASE_PAUSE).await;
        }
    }

    async fn give_back(&self) -> Result<(), kube::Error> {
        let Some(mut lease) = self.api.get_opt(&self.name).await? else { return Ok(()) };
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if spec.holder_identity.as_deref() == Some(&self.identity) {
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
            self.api.replace(&self.name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }

    /// One look, and a write where the lease is ours or free.
    async fn attempt(&mut self) -> Result<Outcome, kube::Error> {
        let Some(mut lease) = self.api.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                spec: Some(self.spec(0)),
            };
            return match self.api.create(&PostParams::default(), &lease).await {
                Ok(_) => Ok(Outcome::Leads),
                Err(kube::Error::Api(status)) if status.code == 409 => Ok(Outcome::Overtaken),
                Err(error) => Err(error),
            };
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let record = (spec.holder_identity.clone(), spec.renew_time.as_ref().map(|time| time.0));
        if self.seen.as_ref().is_none_or(|(holder, renewed, _)| (holder, renewed) != (&record.0, &record.1)) {
            self.seen = Some((record.0.clone(), record.1, Instant::now()));
        }
        let ours = record.0.as_deref() == Some(&self.identity);
        let free = record.0.as_deref().is_none_or(str::is_empty);
        let lapsed = self.seen.as_ref().is_some_and(|(_, _, since)| since.elapsed() >= DURATION);
        if !(ours || free || lapsed) {
            return Ok(Outcome::Follows);
        }
        let transitions = spec.lease_transitions.unwrap_or(0) + i32::from(!ours);
        let mut next = self.spec(transitions);
        if ours {
            next.acquire_time = spec.acquire_time;
        }
        lease.spec = Some(next);
        // The resource version makes sure that nobody else took it since the look.
        match self.api.replace(&self.name, &PostParams::default(), &lease).await {
            Ok(_) => Ok(Outcome::Leads),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Outcome::Overtaken),
            Err(error) => Err(error),
        }
    }

    fn spec(&self, transitions: i32) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}

#[cfg(test)]
mod write_tests;
