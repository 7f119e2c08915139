//! Events that a loop emits in the background: its next decision does not wait for the API server to store them.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use stowage_api::NodeClaim;
use stowage_model::events::DeclaredEvent;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::controllers::context::{Context, reference};

/// Events that wait; beyond this number they are dropped, as events are best effort.
const CAPACITY: usize = 4_096;
/// Events that are emitted concurrently.
const CONCURRENCY: usize = 4;

struct Queued {
    about: ObjectReference,
    event: &'static DeclaredEvent,
    note: String,
}

/// The events of one loop. Those that wait are dropped together with the queue: nothing is written after another replica can lead.
#[derive(Debug)]
pub struct EventQueue {
    sender: mpsc::Sender<Queued>,
    _worker: JoinSet<()>,
}

impl EventQueue {
    /// Starts the worker that emits the events.
    pub fn start(ctx: &Arc<Context>) -> Self {
        Self::every(ctx, Duration::ZERO)
    }

    /// The same, with at most so many events per second.
    pub fn paced(ctx: &Arc<Context>, per_second: NonZeroU32) -> Self {
        Self::every(ctx, Duration::from_secs(1) / per_second.get())
    }

    /// Starts the worker, which waits this long after it took an event.
    fn every(ctx: &Arc<Context>, pause: Duration) -> Self {
        let (sender, receiver) = mpsc::channel::<Queued>(CAPACITY);
        let ctx = Arc::clone(ctx);
        let mut worker = JoinSet::new();
        worker.spawn(async move {
            let queued = stream::unfold(receiver, |mut receiver| async move {
                let next = receiver.recv().await?;
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                Some((next, receiver))
            });
            queued
                .for_each_concurrent(CONCURRENCY, |Queued { about, event, note }| {
                    let ctx = &ctx;
                    async move {
                        ctx.emit(about, event.note(&note)).await;
                    }
                })
                .await;
        });
        Self { sender, _worker: worker }
    }

    /// Waits until every queued event is emitted.
    #[cfg(test)]
    pub async fn drained(self) {
        let Self { sender, _worker: mut worker } = self;
        drop(sender);
        while worker.join_next().await.is_some() {}
    }

    /// Queues an event about an object.
    pub fn emit<K: Resource<DynamicType = ()>>(&self, about: &K, event: &'static DeclaredEvent, note: String) {
        self.emit_about(reference(about), event, note);
    }

    /// The same about the object of this reference.
    pub fn emit_about(&self, about: ObjectReference, event: &'static DeclaredEvent, note: String) {
        let queued = Queued { about, event, note };
        if self.sender.try_send(queued).is_err() {
            tracing::debug!(%event, "event dropped, too many wait");
        }
    }

    /// Queues an event about a NodeClaim, and the same about its Node, if it has one.
    pub fn emit_for_claim_and_node(&self, ctx: &Context, claim: &NodeClaim, event: &'static DeclaredEvent, note: &str) {
        self.emit(claim, event, note.to_owned());
        let node = ctx.cluster.read().node_of(claim).cloned();
        if let Some(node) = node {
            self.emit(&*node, event, note.to_owned());
        }
    }
}
