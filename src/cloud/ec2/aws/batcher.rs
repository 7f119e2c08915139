//! Batches requests: keys that callers ask for within a short window go into one call.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::time::Duration;

use prometheus::Histogram;
use stowage_runtime::telemetry::cloud_metrics::CloudMetrics;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// When a batch window closes.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Time without a new key.
    pub idle: Duration,
    /// Maximum time that the window stays open.
    pub longest: Duration,
    /// Maximum number of keys.
    pub most: usize,
}

/// Windows of DescribeInstances and TerminateInstances by id.
pub const BY_ID: Window = Window { idle: Duration::from_millis(100), longest: Duration::from_secs(1), most: 500 };

/// Windows of DescribeInstances by launch group: EC2 accepts 200 values per filter.
pub const BY_GROUP: Window = Window { most: 200, ..BY_ID };

/// Metrics of batch windows: how long they were open, and how many keys they held.
#[derive(Clone, Debug)]
pub struct BatchMetrics {
    seconds: Histogram,
    sizes: Histogram,
}

impl BatchMetrics {
    /// The metrics of a batcher.
    pub fn new(metrics: &CloudMetrics, batcher: &str) -> Self {
        let labels = [batcher];
        Self {
            seconds: metrics.batch_seconds.with_label_values(&labels),
            sizes: metrics.batch_size.with_label_values(&labels),
        }
    }

    fn closed(&self, open: Duration, keys: usize) {
        self.seconds.observe(open.as_secs_f64());
        // Windows hold hundreds of keys, which a float counts exactly.
        #[allow(clippy::cast_precision_loss)]
        self.sizes.observe(keys as f64);
    }
}

/// Collects keys into batch windows. Dropping it ends its task.
#[derive(Debug)]
pub struct Coalescer<K, V> {
    sender: mpsc::UnboundedSender<(K, oneshot::Sender<V>)>,
}

impl<K, V> Coalescer<K, V>
where
    K: Clone + Eq + Hash + Send + 'static,
    V: Clone + Send + 'static,
{
    /// Starts collecting. `run` receives the distinct keys of a window and answers each; several windows may run concurrently.
    pub fn start<F, R>(window: Window, metrics: BatchMetrics, run: F) -> Self
    where
        F: Fn(Vec<K>) -> R + Send + 'static,
        R: Future<Output = HashMap<K, V>> + Send + 'static,
    {
        let (sender, mut receiver) = mpsc::unbounded_channel::<(K, oneshot::Sender<V>)>();
        tokio::spawn(async move {
            while let Some(first) = receiver.recv().await {
                let begin = Instant::now();
                let batch = collect(&mut receiver, first, window).await;
                metrics.closed(begin.elapsed(), batch.len());
                let call = run(batch.keys().cloned().collect());
                tokio::spawn(async move {
                    let answers = call.await;
                    for (key, callers) in batch {
                        if let Some(answer) = answers.get(&key) {
                            for caller in callers {
                                // The caller may have been dropped.
                                let _ = caller.send(answer.clone());
                            }
                        }
                    }
                });
            }
        });
        Self { sender }
    }

    /// The answer for a key; `None` if the call returned none.
    pub async fn ask(&self, key: K) -> Option<V> {
        let (sender, receiver) = oneshot::channel();
        self.sender.send((key, sender)).ok()?;
        receiver.await.ok()
    }
}

type Batch<K, V> = HashMap<K, Vec<oneshot::Sender<V>>>;

async fn collect<K: Eq + Hash, V>(
    receiver: &mut mpsc::UnboundedReceiver<(K, oneshot::Sender<V>)>,
    first: (K, oneshot::Sender<V>),
    window: Window,
) -> Batch<K, V> {
    let mut batch: Batch<K, V> = HashMap::from([(first.0, vec![first.1])]);
    let end = Instant::now() + window.longest;
    while batch.len() < window.most {
        let until = end.min(Instant::now() + window.idle);
        match tokio::time::timeout_at(until, receiver.recv()).await {
            Ok(Some((key, caller))) => batch.entry(key).or_default().push(caller),
            Ok(None) | Err(_) => break,
        }
    }
    batch
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    const SHORT: Window = Window { idle: Duration::from_millis(30), longest: Duration::from_millis(500), most: 3 };

    fn recording() -> (Coalescer<u32, u32>, Arc<Mutex<Vec<usize>>>) {
        recording_with(BatchMetrics::new(&CloudMetrics::new(), "test"))
    }

    fn recording_with(metrics: BatchMetrics) -> (Coalescer<u32, u32>, Arc<Mutex<Vec<usize>>>) {
        let sizes = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&sizes);
        let coalescer = Coalescer::start(SHORT, metrics, move |keys: Vec<u32>| {
            seen.lock().unwrap().push(keys.len());
            async move { keys.into_iter().filter(|key| *key != 13).map(|key| (key, key * 10)).collect() }
        });
        (coalescer, sizes)
    }

    #[tokio::test]
    async fn keys_of_a_window_share_a_call_without_duplicates() {
        let (coalescer, sizes) = recording();
        let answers = futures::future::join_all([1, 2, 1].map(|key| coalescer.ask(key))).await;
        assert_eq!(answers, [Some(10), Some(20), Some(10)]);
        assert_eq!(*sizes.lock().unwrap(), [2]);
    }

    #[tokio::test]
    async fn each_window_is_observed() {
        let metrics = BatchMetrics::new(&CloudMetrics::new(), "test");
        let (coalescer, _) = recording_with(metrics.clone());
        futures::future::join_all([1, 2].map(|key| coalescer.ask(key))).await;
        coalescer.ask(3).await;
        assert_eq!((metrics.sizes.get_sample_count(), metrics.seconds.get_sample_count()), (2, 2));
        // Two keys and one.
        assert!((metrics.sizes.get_sample_sum() - 3.0).abs() < f64::EPSILON);
        assert!(metrics.seconds.get_sample_sum() >= 0.06, "each stays open for its idle time");
    }

    #[tokio::test]
    async fn a_full_window_closes_at_once_and_later_keys_use_the_next() {
        let (coalescer, sizes) = recording();
        let answers = futures::future::join_all((1..=5).map(|key| coalescer.ask(key))).await;
        assert_eq!(answers, [10, 20, 30, 40, 50].map(Some));
        let mut sizes = sizes.lock().unwrap().clone();
        sizes.sort_unstable();
        assert_eq!(sizes, [2, 3]);
    }

    #[tokio::test]
    async fn a_key_without_an_answer_is_none() {
        let (coalescer, _) = recording();
        assert_eq!(coalescer.ask(13).await, None);
    }
}
