//! The open connections of a listener, shared fairly between peers.
//!
//! A connection must start its first request soon, and is closed when it is idle for long. A full table closes a connection of the peer
//! that has most of them, so that one address never keeps the others out.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::task::AtomicWaker;
use stowage_runtime::sync::lock;
use stowage_runtime::telemetry::Metrics;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

/// How often overdue connections are looked up.
const SWEEP: Duration = Duration::from_secs(1);

/// Limits of one listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of open connections.
    pub connections: usize,
    /// Time from accepting a connection to its first request; a TLS handshake is part of it.
    pub first_request: Duration,
    /// Time from the start or end of a request to the next one. Longer than the time limit of a request.
    pub idle: Duration,
}

/// The open connections of one listener.
#[derive(Debug)]
pub(crate) struct Connections {
    what: &'static str,
    limits: Limits,
    metrics: Metrics,
    started: Instant,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    open: HashMap<u64, Arc<Link>>,
    /// Open connections per peer; never zero.
    peers: HashMap<IpAddr, usize>,
}

/// What the table, the stream and the requests of a connection share.
#[derive(Debug)]
struct Link {
    peer: IpAddr,
    /// Milliseconds since the listener started, when it was accepted, or when its last request started or ended.
    used: AtomicU64,
    /// Requests in progress.
    requests: AtomicUsize,
    /// Whether a request has started on this connection.
    has_requested: AtomicBool,
    closed: AtomicBool,
    reader: AtomicWaker,
    writer: AtomicWaker,
}

impl Link {
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.reader.wake();
        self.writer.wake();
    }

    fn is_idle(&self) -> bool {
        self.requests.load(Ordering::Acquire) == 0
    }
}

impl Table {
    fn remove(&mut self, id: u64) -> Option<Arc<Link>> {
        let link = self.open.remove(&id)?;
        if let Some(count) = self.peers.get_mut(&link.peer) {
            *count -= 1;
            if *count == 0 {
                self.peers.remove(&link.peer);
            }
        }
        Some(link)
    }

    /// The connection to close in favor of a new one of `peer`: an idle one of a peer with at least as many, or any one of a peer that has
    /// more than `peer` would have; idle ones first, then those of the largest peer, then the one used longest ago.
    fn victim(&self, peer: IpAddr) -> Option<u64> {
        let own = self.peers.get(&peer).copied().unwrap_or(0);
        let candidates = self.open.iter().filter_map(|(id, link)| {
            let theirs = self.peers.get(&link.peer).copied().unwrap_or(0);
            let idle = link.is_idle();
            let eligible = if idle { theirs >= own } else { theirs > own + 1 };
            eligible.then(|| (!idle, std::cmp::Reverse(theirs), link.used.load(Ordering::Acquire), *id))
        });
        candidates.min().map(|(.., id)| id)
    }
}

impl Connections {
    /// An empty table, whose overdue connections a task closes for as long as the table lives.
    pub(crate) fn new(what: &'static str, limits: Limits, metrics: &Metrics) -> Arc<Self> {
        let started = Instant::now();
        let connections = Arc::new(Self { what, limits, metrics: metrics.clone(), started, table: Mutex::default() });
        let swept = Arc::downgrade(&connections);
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(SWEEP);
            loop {
                ticks.tick().await;
                let Some(connections) = swept.upgrade() else { return };
                connections.sweep(connections.now());
            }
        });
        connections
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Takes a connection of `peer` into the table. `None` if the table is full of connections that may not be closed for it.
    pub(crate) fn admit(self: &Arc<Self>, peer: IpAddr) -> Option<Ticket> {
        let mut table = lock(&self.table);
        if table.open.len() >= self.limits.connections {
            let closed = table.victim(peer).and_then(|id| table.remove(id));
            let action = if closed.is_some() { "evicted" } else { "refused" };
            self.metrics.connections_closed.with_label_values(&[self.what, action]).inc();
            closed?.close();
        }
        let id = table.next;
        table.next += 1;
        let link = Arc::new(Link {
            peer,
            used: AtomicU64::new(self.now()),
            requests: AtomicUsize::new(0),
            has_requested: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            reader: AtomicWaker::new(),
            writer: AtomicWaker::new(),
        });
        table.open.insert(id, Arc::clone(&link));
        *table.peers.entry(peer).or_default() += 1;
        self.record_open_connections(&table);
        Some(Ticket { id, link, connections: Arc::clone(self) })
    }

    /// Closes the connections that exceed a time limit `now` milliseconds after the start.
    fn sweep(&self, now: u64) {
        let over = |since: u64, limit: Duration| Duration::from_millis(now.saturating_sub(since)) >= limit;
        let mut table = lock(&self.table);
        let overdue: Vec<u64> = table
            .open
            .iter()
            .filter(|(_, link)| {
                let has_requested = link.has_requested.load(Ordering::Acquire);
                let limit = if has_requested { self.limits.idle } else { self.limits.first_request };
                over(link.used.load(Ordering::Acquire), limit)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in overdue {
            if let Some(link) = table.remove(id) {
                link.close();
                self.metrics.connections_closed.with_label_values(&[self.what, "idle"]).inc();
            }
        }
        self.record_open_connections(&table);
    }

    fn record_open_connections(&self, table: &Table) {
        let open = i64::try_from(table.open.len()).unwrap_or(i64::MAX);
        self.metrics.connections.with_label_values(&[self.what]).set(open);
    }
}

/// A place in the table; removed on drop.
#[derive(Debug)]
pub(crate) struct Ticket {
    id: u64,
    link: Arc<Link>,
    connections: Arc<Connections>,
}

impl Ticket {
    /// The peer's address.
    pub(crate) fn peer(&self) -> IpAddr {
        self.link.peer
    }

    /// Counts a request of the connection until the value is dropped.
    pub(crate) fn request(self: &Arc<Self>) -> InRequest {
        self.link.requests.fetch_add(1, Ordering::AcqRel);
        self.link.has_requested.store(true, Ordering::Release);
        self.link.used.store(self.connections.now(), Ordering::Release);
        InRequest(Arc::clone(self))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut table = lock(&self.connections.table);
        table.remove(self.id);
        self.connections.record_open_connections(&table);
    }
}

/// A request in progress.
#[derive(Debug)]
pub(crate) struct InRequest(Arc<Ticket>);

impl Drop for InRequest {
    fn drop(&mut self) {
        self.0.link.used.store(self.0.connections.now(), Ordering::Release);
        self.0.link.requests.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A stream that ends when its connection is closed by the table.
#[derive(Debug)]
pub(crate) struct Closable<S> {
    stream: S,
    link: Arc<Link>,
}

impl<S> Closable<S> {
    pub(crate) fn new(stream: S, ticket: &Ticket) -> Self {
        Self { stream, link: Arc::clone(&ticket.link) }
    }

    fn open(link: &Link, waker: &AtomicWaker, context: &Context<'_>) -> io::Result<()> {
        // Registered before the flag is read: a close between the two wakes the task.
        waker.register(context.waker());
        if link.closed.load(Ordering::Acquire) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the connection was closed in favor of others"));
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Closable<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Err(closed) = Self::open(&this.link, &this.link.reader, context) {
            return Poll::Ready(Err(closed));
        }
        Pin::new(&mut this.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Closable<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let Err(closed) = Self::open(&this.link, &this.link.writer, context) {
            return Poll::Ready(Err(closed));
        }
        Pin::new(&mut this.stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Err(closed) = Self::open(&this.link, &this.link.writer, context) {
            return Poll::Ready(Err(closed));
        }
        Pin::new(&mut this.stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn connections(limit: usize) -> Arc<Connections> {
        let limits =
            Limits { connections: limit, first_request: Duration::from_secs(10), idle: Duration::from_mins(5) };
        Connections::new("https", limits, &Metrics::new())
    }

    #[tokio::test]
    async fn a_full_table_closes_a_connection_of_the_peer_with_most() {
        let table = connections(4);
        let many: Vec<_> = (0..3).map(|_| table.admit(ip(1)).unwrap()).collect();
        let other = table.admit(ip(2)).unwrap();
        let new = table.admit(ip(3)).expect("peer 1 has three");
        let closed: Vec<bool> = many.iter().map(|ticket| ticket.link.closed.load(Ordering::Acquire)).collect();
        assert_eq!(closed.iter().filter(|closed| **closed).count(), 1, "one of the largest peer is closed");
        assert!(!other.link.closed.load(Ordering::Acquire) && !new.link.closed.load(Ordering::Acquire));
        assert_eq!(lock(&table.table).peers, HashMap::from([(ip(1), 2), (ip(2), 1), (ip(3), 1)]));
        drop(many);
        assert_eq!(lock(&table.table).open.len(), 2, "a closed connection is not removed twice");
    }

    #[tokio::test]
    async fn requests_of_the_peer_with_most_give_way_to_a_peer_without_connections() {
        let table = connections(3);
        let busy: Vec<_> = (0..3).map(|_| Arc::new(table.admit(ip(1)).unwrap())).collect();
        let requests: Vec<_> = busy.iter().map(Ticket::request).collect();
        assert!(table.admit(ip(1)).is_none(), "its own requests are not interrupted");
        let first = Arc::new(table.admit(ip(2)).expect("three are more than one"));
        let _request = first.request();
        assert!(table.admit(ip(2)).is_none(), "two and two would be no fairer");
        drop(requests);
        assert!(table.admit(ip(2)).is_some(), "an idle one of a peer with as many");
    }

    #[tokio::test]
    async fn a_connection_without_requests_is_closed_in_time() {
        let table = connections(9);
        let silent = table.admit(ip(1)).unwrap();
        let used = Arc::new(table.admit(ip(1)).unwrap());
        let running = Arc::new(table.admit(ip(1)).unwrap());
        drop(used.request());
        let _request = running.request();
        for ticket in [&silent, &*used, &*running] {
            ticket.link.used.store(1_000, Ordering::Release);
        }
        let closed = || [&silent, &*used, &*running].map(|ticket| ticket.link.closed.load(Ordering::Acquire));
        table.sweep(10_999);
        assert_eq!(closed(), [false, false, false]);
        table.sweep(11_000);
        assert_eq!(closed(), [true, false, false], "ten seconds for the first request");
        table.sweep(300_999);
        assert_eq!(closed(), [true, false, false]);
        table.sweep(301_000);
        assert_eq!(
            closed(),
            [true, true, true],
            "five minutes for the next; a client that reads no answer is closed as well"
        );
        assert!(lock(&table.table).open.is_empty());
    }

    #[tokio::test]
    async fn closing_wakes_the_reader_and_the_writer() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let table = connections(1);
        let ticket = table.admit(ip(1)).unwrap();
        let (here, there) = tokio::io::duplex(8);
        let (mut reader, mut writer) = tokio::io::split(Closable::new(here, &ticket));
        let read = tokio::spawn(async move { reader.read_u8().await });
        let write = tokio::spawn(async move { writer.write_all(&[0; 64]).await });
        tokio::task::yield_now().await;
        let _second = table.admit(ip(2)).unwrap();
        assert_eq!(read.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(write.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(there);
    }
}
