//! Request bodies within bounds: bytes and requests in progress, in total and per peer.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use axum::body::{self, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use futures::stream::BoxStream;
use futures::{StreamExt, stream};
use stowage_runtime::sync::lock;
use tokio::sync::Semaphore;

use crate::server::accept::Peer;
use crate::server::middleware::error;
use crate::server::server_settings::Bounds;

/// The requests of one route; an extension of each of them.
#[derive(Debug)]
pub(crate) struct Intake {
    pub(crate) bounds: Bounds,
    bytes: Arc<Share>,
    requests: Arc<Share>,
    /// Permits to process a large body.
    pub(crate) processors: Arc<Semaphore>,
}

impl Intake {
    pub(crate) fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self {
            bounds,
            bytes: Share::new(bounds.bytes, bounds.bytes_per_peer, bounds.bytes_guaranteed),
            requests: Share::new(bounds.requests, bounds.requests_per_peer, bounds.requests_guaranteed),
            processors: Arc::new(Semaphore::new(bounds.large_at_a_time)),
        })
    }
}

/// A quantity that peers share: a total, a maximum per peer, and an amount that each peer may use in any case.
#[derive(Debug)]
pub(crate) struct Share {
    total: usize,
    per_peer: usize,
    guaranteed: usize,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    all: usize,
    /// Never zero.
    by_peer: HashMap<IpAddr, usize>,
}

impl Share {
    pub(crate) fn new(total: usize, per_peer: usize, guaranteed: usize) -> Arc<Self> {
        Arc::new(Self { total, per_peer, guaranteed, used: Mutex::default() })
    }

    pub(crate) fn portion(self: &Arc<Self>, peer: IpAddr) -> Portion {
        Portion { share: Arc::clone(self), peer, amount: 0 }
    }
}

/// What one request uses of a share; returned on drop.
#[derive(Debug)]
pub(crate) struct Portion {
    share: Arc<Share>,
    peer: IpAddr,
    amount: usize,
}

impl Portion {
    /// Enlarges the portion, or changes nothing and returns `false` when the share is used up.
    #[must_use]
    pub(crate) fn grow(&mut self, amount: usize) -> bool {
        let mut used = lock(&self.share.used);
        let of_peer = used.by_peer.get(&self.peer).copied().unwrap_or(0);
        let (all, of_peer) = (used.all.saturating_add(amount), of_peer.saturating_add(amount));
        // A peer that uses little is admitted although others have used up the total.
        let within = all <= self.share.total || of_peer <= self.share.guaranteed;
        if !within || of_peer > self.share.per_peer {
            return false;
        }
        if amount > 0 {
            used.all = all;
            used.by_peer.insert(self.peer, of_peer);
            self.amount += amount;
        }
        true
    }
}

impl Drop for Portion {
    fn drop(&mut self) {
        let mut used = lock(&self.share.used);
        used.all -= self.amount;
        if let Some(of_peer) = used.by_peer.get_mut(&self.peer) {
            *of_peer -= self.amount;
            if *of_peer == 0 {
                used.by_peer.remove(&self.peer);
            }
        }
    }
}

/// A whole body. It counts against the bounds of its route until it is dropped.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) bytes: Vec<u8>,
    pub(crate) intake: Arc<Intake>,
    _bytes: Portion,
    _request: Portion,
}

impl<S: Sync> FromRequest<S> for Body {
    type Rejection = Response;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Response> {
        let extensions = request.extensions();
        let (Some(peer), Some(intake)) = (extensions.get::<Peer>(), extensions.get::<Arc<Intake>>().map(Arc::clone))
        else {
            return Err(error(StatusCode::INTERNAL_SERVER_ERROR, "the route has no bounds"));
        };
        let (mut held, mut counted) =
            (intake.bytes.portion(peer.ticket.peer()), intake.requests.portion(peer.ticket.peer()));
        if !counted.grow(1) {
            return Err(busy("too many requests in progress"));
        }
        let limit = intake.bounds.body;
        let too_large = || error(StatusCode::PAYLOAD_TOO_LARGE, &format!("the body exceeds {limit} bytes"));
        let announced =
            request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        if announced.is_some_and(|length: u64| length > limit as u64) {
            return Err(too_large());
        }
        let mut bytes = Vec::new();
        let mut stream = request.into_body().into_data_stream();
        while let Some(chunk) = stream.next().await {
            let chunk =
                chunk.map_err(|cause| error(StatusCode::BAD_REQUEST, &format!("can't read the body: {cause}")))?;
            if bytes.len() + chunk.len() > limit {
                return Err(too_large());
            }
            if !held.grow(chunk.len()) {
                return Err(busy("too many bytes of requests in progress"));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(Self { bytes, intake, _bytes: held, _request: counted })
    }
}

/// Bytes of an answer that are handed to the connection at a time.
const CHUNK: usize = 64 << 10;

/// A body that uses its portion until nearly all of it is sent.
pub(crate) fn in_chunks(bytes: Bytes, portion: Portion) -> body::Body {
    in_chunks_of(stream::iter([bytes]).boxed(), portion)
}

/// A body of several parts that uses its portion until nearly all of it is sent. A part is made when the ones before are sent.
pub(crate) fn in_chunks_of(parts: BoxStream<'static, Bytes>, portion: Portion) -> body::Body {
    let begin = (Bytes::new(), parts, portion);
    body::Body::from_stream(stream::unfold(begin, |(mut bytes, mut parts, portion)| async move {
        while bytes.is_empty() {
            bytes = parts.next().await?;
        }
        let chunk = bytes.split_to(bytes.len().min(CHUNK));
        Some((Ok::<_, Infallible>(chunk), (bytes, parts, portion)))
    }))
}

pub(crate) fn busy(message: &str) -> Response {
    let mut response = error(StatusCode::TOO_MANY_REQUESTS, message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_bounded_in_total_and_per_peer() {
        let share = Share::new(10, 6, 1);
        let peer = |last| IpAddr::from([10, 0, 0, last]);
        let (mut first, mut second, mut third) =
            (share.portion(peer(1)), share.portion(peer(1)), share.portion(peer(2)));
        assert!(first.grow(4) && second.grow(2), "six of one peer");
        assert!(!first.grow(1) && !second.grow(usize::MAX), "no more of it");
        assert!(third.grow(4), "ten in total");
        assert!(!third.grow(1), "the total is used up, although the peer has four");
        let mut small = share.portion(peer(3));
        assert!(small.grow(1) && !small.grow(1), "a peer without any gets its guaranteed amount");
        drop(small);
        drop(first);
        assert!(second.grow(4), "returned, and lent again");
        drop((second, third));
        let used = lock(&share.used);
        assert!(used.all == 0 && used.by_peer.is_empty());
    }
}
