//! State shared by all handlers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use arc_swap::{ArcSwap, Guard};
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::heartbeat::Heartbeats;
use stowage_runtime::telemetry::Metrics;
use tokio::sync::Notify;

use crate::extender::View;
use crate::server::debug_source::DebugDocument;
use crate::server::series_source::SeriesSource;
use crate::webhook::rule_list::Rules;

/// State shared by all handlers. The controllers store a new [`View`] when holds, plans or nodes change.
#[derive(Debug)]
pub struct AppState {
    /// The extender's view.
    pub view: Arc<ArcSwap<View>>,
    /// Notified of requests that read the view.
    pub view_requests: Arc<Notify>,
    /// The admission rules that the webhook applies.
    pub rules: Rules,
    /// What `/debug/state` answers.
    pub debug: DebugDocument,
    /// What follows the registry's metrics in an answer of `/metrics`, in parts.
    pub series: SeriesSource,
    /// When this replica began to lead; [`UnixMillis::MIN`] while it does not.
    leading_since: AtomicI64,
    /// Metrics.
    pub metrics: Metrics,
    /// Conditions of `/readyz`.
    pub readiness: Readiness,
    /// The loops whose turns `/livez` watches.
    pub heartbeats: Heartbeats,
    /// Name of the Lease, for metrics.
    pub lease: String,
    /// The clock; [`stowage_runtime::clock::now`] outside tests.
    pub now: fn() -> UnixMillis,
}

impl AppState {
    /// The extender's view, for a request.
    pub fn requested_view(&self) -> Guard<Arc<View>> {
        self.view_requests.notify_one();
        self.view.load()
    }

    /// Records whether this replica leads.
    pub fn set_leading(&self, leading: bool) {
        self.metrics.leader.set(leading.into());
        self.metrics.leader_status.with_label_values(&[&self.lease]).set(leading.into());
        self.leading_since.store(if leading { (self.now)() } else { UnixMillis::MIN }.0, Ordering::Release);
    }

    /// When this replica began to lead; `None` while it does not.
    pub fn leading_since(&self) -> Option<UnixMillis> {
        let since = UnixMillis(self.leading_since.load(Ordering::Acquire));
        (since != UnixMillis::MIN).then_some(since)
    }

    /// State with an empty view, which denies nothing.
    #[must_use]
    pub fn new(metrics: Metrics, now: fn() -> UnixMillis) -> Self {
        Self {
            view: Arc::default(),
            view_requests: Arc::default(),
            rules: Rules::default(),
            debug: DebugDocument::default(),
            series: SeriesSource::default(),
            leading_since: AtomicI64::new(UnixMillis::MIN.0),
            heartbeats: observed_heartbeats(&metrics),
            lease: String::new(),
            metrics,
            readiness: Readiness::default(),
            now,
        }
    }
}

/// Heartbeats whose turns are counted.
fn observed_heartbeats(metrics: &Metrics) -> Heartbeats {
    let (counts, seconds) = (metrics.turns.clone(), metrics.turn_seconds.clone());
    Heartbeats::observed_by(move |name, took, ok| {
        counts.with_label_values(&[name, if ok { "success" } else { "error" }]).inc();
        seconds.with_label_values(&[name]).observe(took.as_secs_f64());
    })
}

/// When certificates expire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expiries {
    /// The serving certificate itself.
    pub(crate) serving: UnixMillis,
    /// The earliest of the serving certificate and its intermediates.
    pub(crate) chain: UnixMillis,
    /// The client CAs; `None` without one.
    pub(crate) client_ca: Option<UnixMillis>,
    pub(crate) webhook_client_ca: Option<UnixMillis>,
}

/// Conditions of `/readyz`.
#[derive(Debug)]
pub struct Readiness {
    caches_synced: AtomicBool,
    draining: AtomicBool,
    serving_expires_at: AtomicI64,
    chain_expires_at: AtomicI64,
    client_ca_expires_at: AtomicI64,
    webhook_client_ca_expires_at: AtomicI64,
}

impl Default for Readiness {
    fn default() -> Self {
        Self {
            caches_synced: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            serving_expires_at: AtomicI64::new(i64::MIN),
            chain_expires_at: AtomicI64::new(i64::MIN),
            client_ca_expires_at: AtomicI64::new(i64::MIN),
            webhook_client_ca_expires_at: AtomicI64::new(i64::MIN),
        }
    }
}

impl Readiness {
    /// Records whether all watch caches are synced; set by the controllers.
    pub fn set_caches_synced(&self, synced: bool) {
        self.caches_synced.store(synced, Ordering::Release);
    }

    /// Records when the certificates in use expire.
    pub(crate) fn set_expiries(&self, expiries: Expiries) {
        let store = |place: &AtomicI64, at: Option<UnixMillis>| {
            place.store(at.map_or(i64::MIN, |at| at.0), Ordering::Release);
        };
        store(&self.serving_expires_at, Some(expiries.serving));
        store(&self.chain_expires_at, Some(expiries.chain));
        store(&self.client_ca_expires_at, expiries.client_ca);
        store(&self.webhook_client_ca_expires_at, expiries.webhook_client_ca);
    }

    /// Expiry of the certificates in use, by name.
    pub(crate) fn expiries(&self) -> impl Iterator<Item = (&'static str, UnixMillis)> {
        [
            ("serving", self.chain_expires_at.load(Ordering::Acquire)),
            ("client_ca", self.client_ca_expires_at.load(Ordering::Acquire)),
            ("webhook_client_ca", self.webhook_client_ca_expires_at.load(Ordering::Acquire)),
        ]
        .into_iter()
        .filter(|(_, expires)| *expires != i64::MIN)
        .map(|(name, expires)| (name, UnixMillis(expires)))
    }

    pub(crate) fn set_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// The reasons for not being ready; empty when ready.
    pub fn missing(&self, now: UnixMillis) -> Vec<&'static str> {
        let expires = self.serving_expires_at.load(Ordering::Acquire);
        [
            (!self.caches_synced.load(Ordering::Acquire), "watch caches are not synced"),
            (expires == i64::MIN, "no serving certificate is loaded"),
            (expires != i64::MIN && expires <= now.0, "the serving certificate has expired"),
            (self.draining.load(Ordering::Acquire), "shutting down"),
        ]
        .into_iter()
        .filter_map(|(missing, reason)| missing.then_some(reason))
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_requires_caches_and_a_valid_certificate_and_ends_with_draining() {
        let readiness = Readiness::default();
        assert_eq!(
            readiness.missing(UnixMillis(0)),
            ["watch caches are not synced", "no serving certificate is loaded"]
        );
        readiness.set_caches_synced(true);
        let (serving, chain) = (UnixMillis(1000), UnixMillis(900));
        readiness.set_expiries(Expiries { serving, chain, client_ca: None, webhook_client_ca: None });
        // Clients may verify the leaf by another chain, so an intermediate is only reported.
        assert!(readiness.missing(UnixMillis(999)).is_empty());
        assert_eq!(readiness.expiries().collect::<Vec<_>>(), [("serving", chain)]);
        assert_eq!(readiness.missing(UnixMillis(1000)), ["the serving certificate has expired"]);
        readiness.set_draining();
        assert_eq!(readiness.missing(UnixMillis(0)), ["shutting down"]);
    }
}
