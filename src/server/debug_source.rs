//! Where the document of `/debug/state` is from.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::body::Bytes;
use tokio::sync::{Mutex, OwnedMutexGuard};

/// Makes the document.
pub(crate) type Render = dyn Fn() -> Vec<u8> + Send + Sync;

/// The source of the document, and its last one, which all answers share.
#[derive(Default)]
pub struct DebugDocument {
    render: OnceLock<Arc<Render>>,
    last: Arc<Mutex<Option<(Instant, Bytes)>>>,
}

impl fmt::Debug for DebugDocument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DebugDocument").finish_non_exhaustive()
    }
}

impl DebugDocument {
    /// Sets the source; the first one stays. It does no I/O, and its documents are bounded.
    pub fn set_source(&self, render: impl Fn() -> Vec<u8> + Send + Sync + 'static) {
        let _ = self.render.set(Arc::new(render));
    }

    pub(crate) fn render(&self) -> Option<Arc<Render>> {
        self.render.get().map(Arc::clone)
    }

    /// The last document and when it was made, locked while another one is made.
    pub(crate) async fn last(&self) -> OwnedMutexGuard<Option<(Instant, Bytes)>> {
        Arc::clone(&self.last).lock_owned().await
    }
}
