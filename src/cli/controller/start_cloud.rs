//! Leads with a connected cloud. A cloud that can't be reached ends no process: webhook and extender need none.
//!
//! A replica is a candidate for the lease only while it can reach its cloud. A leader that can't connect for [`Timing::give_up_after`] gives the
//! lease back, and stands back for [`Timing::stand_back`], so that a replica with access can lead.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use prometheus::IntCounter;
use stowage_cloud::Cloud;
use stowage_cloud::ec2;
use stowage_cloud::ec2::Ec2Provider;
use stowage_cloud::simulated::SimulatedEc2;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::cli::controller::cloud_setup::Prepared;
use crate::controllers::leader::LeaderCandidate;
use crate::controllers::supervise::supervised;
use crate::server::AppState;

/// The periods of the start.
#[derive(Clone, Copy, Debug)]
struct Timing {
    /// First and longest wait between two attempts to connect; the wait doubles.
    retry: (Duration, Duration),
    /// A leader without its cloud for this long gives the lease back.
    give_up_after: Duration,
    /// Other candidates read the lease every two seconds.
    stand_back: Duration,
}

const TIMING: Timing = Timing {
    retry: (Duration::from_secs(1), Duration::from_secs(30)),
    give_up_after: Duration::from_mins(3),
    stand_back: Duration::from_secs(20),
};

/// The start of the leader's cloud.
pub(crate) struct Starting<'a> {
    pub(crate) prepared: Prepared,
    pub(crate) client: &'a kube::Client,
    /// Counts failed attempts.
    pub(crate) failed: &'a IntCounter,
}

impl Starting<'_> {
    /// Acquires the lease and connects the cloud, whose background loops it spawns. `None` when the process was stopped meanwhile.
    ///
    /// # Errors
    /// The lease was lost.
    pub(crate) async fn lead_with_cloud(
        self,
        election: &LeaderCandidate,
        state: &AppState,
        stopped: &mut watch::Receiver<bool>,
        loops: &mut JoinSet<()>,
    ) -> anyhow::Result<Option<Arc<dyn Cloud>>> {
        let options = match &self.prepared {
            Prepared::Simulated(simulated) => {
                if !acquire(election, state, stopped).await {
                    return Ok(None);
                }
                return Ok(Some(self.simulated(simulated, stopped.clone())));
            }
            Prepared::Ec2(options) => options,
        };
        let start = |clients: ec2::AwsClients| {
            let (client, options) = (self.client.clone(), ec2::Options::clone(options));
            async move { Ec2Provider::start(&client, clients, options).await }
        };
        let candidacy = Candidacy { timing: TIMING, election, state, stopped, failed: self.failed };
        let Some(started) = candidacy.lead_with(Ec2Provider::connect, start).await? else { return Ok(None) };
        let ec2 = Arc::new(started);
        let (provider, client) = (Arc::clone(&ec2), self.client.clone());
        let run = move || Arc::clone(&provider).run(client.clone());
        loops.spawn(supervised("EC2", state.metrics.loop_panics.clone(), run));
        ec2::publish(&ec2, state.metrics.registry()).context("registering the EC2 metrics")?;
        Ok(Some(ec2))
    }

    fn simulated(&self, simulated: &Arc<SimulatedEc2>, mut stopped: watch::Receiver<bool>) -> Arc<dyn Cloud> {
        let shutdown = async move {
            let _ = stopped.wait_for(|stop| *stop).await;
        };
        tokio::spawn(Arc::clone(simulated).run(self.client.clone(), shutdown));
        Arc::clone(simulated) as Arc<dyn Cloud>
    }
}

/// The part of a replica in the election of the leader, until its cloud runs.
struct Candidacy<'a> {
    timing: Timing,
    election: &'a LeaderCandidate,
    state: &'a AppState,
    stopped: &'a mut watch::Receiver<bool>,
    /// Counts failed attempts.
    failed: &'a IntCounter,
}

impl Candidacy<'_> {
    /// Connects, acquires the lease, and starts what `start` makes of the connection. `None` when the process was stopped meanwhile.
    ///
    /// # Errors
    /// The lease was lost.
    async fn lead_with<C, T, E, F, G>(
        self,
        connect: impl Fn() -> F,
        start: impl Fn(C) -> G,
    ) -> anyhow::Result<Option<T>>
    where
        C: Clone,
        E: Display,
        F: Future<Output = Result<C, E>>,
        G: Future<Output = Result<T, E>>,
    {
        let Self { timing, election, state, stopped, failed } = self;
        loop {
            let connected = tokio::select! {
                connected = retried("connecting to AWS", timing.retry, failed, &connect) => connected,
                () = stop(stopped) => return Ok(None),
            };
            if !acquire(election, state, stopped).await {
                return Ok(None);
            }
            let start = retried("starting EC2", timing.retry, failed, || start(connected.clone()));
            // Loading the region's catalog takes time; the lease is renewed meanwhile.
            let started = tokio::select! {
                started = tokio::time::timeout(timing.give_up_after, start) => Some(started.ok()),
                lost = lost(election) => return Err(lost),
                () = stop(stopped) => None,
            };
            let Some(started) = started else {
                election.release().await;
                return Ok(None);
            };
            if started.is_some() {
                return Ok(started);
            }
            tracing::error!(
                seconds = timing.give_up_after.as_secs(),
                "EC2 could not be started, giving the lease back"
            );
            state.set_leading(false);
            election.release().await;
            tokio::select! {
                () = tokio::time::sleep(timing.stand_back) => {}
                () = stop(stopped) => return Ok(None),
            }
        }
    }
}

/// Waits until the process is stopped.
async fn stop(stopped: &mut watch::Receiver<bool>) {
    let _ = stopped.wait_for(|stop| *stop).await;
}

/// Waits for the lease. Returns false when the process was stopped meanwhile.
async fn acquire(election: &LeaderCandidate, state: &AppState, stopped: &mut watch::Receiver<bool>) -> bool {
    tokio::select! {
        () = election.acquire() => tracing::info!("leading"),
        () = stop(stopped) => return false,
    }
    state.set_leading(true);
    true
}

/// Renews the lease until it is lost; returns the reason.
pub(crate) async fn lost(election: &LeaderCandidate) -> anyhow::Error {
    let why = election.renew().await;
    anyhow::anyhow!("the leader lease was lost: {why}; this replica starts over")
}

/// Attempts something until it succeeds, with backoff.
async fn retried<T, E: Display, F: Future<Output = Result<T, E>>>(
    attempted: &'static str,
    (first, longest): (Duration, Duration),
    failed: &IntCounter,
    attempt: impl Fn() -> F,
) -> T {
    let mut wait = first;
    loop {
        match attempt().await {
            Ok(out) => return out,
            Err(error) => {
                failed.inc();
                tracing::error!(attempted, %error, seconds = wait.as_secs(), "cloud is not available, retrying");
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(longest);
    }
}

#[cfg(test)]
mod tests;
