//! Where series of `/metrics` are from that no collector keeps.

use std::fmt;
use std::sync::OnceLock;

use axum::body::Bytes;
use futures::stream::BoxStream;

/// Makes the series of one answer, as text in parts.
type Render = dyn Fn() -> BoxStream<'static, Bytes> + Send + Sync;

/// The source of the series, once there is one.
#[derive(Default)]
pub struct SeriesSource {
    render: OnceLock<Box<Render>>,
}

impl fmt::Debug for SeriesSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SeriesSource").finish_non_exhaustive()
    }
}

impl SeriesSource {
    /// Sets the source; the first one stays. It does no I/O, and its parts are small.
    pub fn set_source(&self, render: impl Fn() -> BoxStream<'static, Bytes> + Send + Sync + 'static) {
        let _ = self.render.set(Box::new(render));
    }

    pub(crate) fn parts(&self) -> Option<BoxStream<'static, Bytes>> {
        self.render.get().map(|render| render())
    }
}
