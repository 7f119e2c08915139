//! Panics as results. A panic is a defect, but it must affect nothing beyond what caused it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use futures::FutureExt;

/// Maximum length of a panic's message in logs, in bytes.
const MAX_MESSAGE: usize = 500;

/// A caught panic, with its message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Panic(String);

/// Calls `work`. What it shares with others must be complete whenever it panics, or be discarded.
///
/// # Errors
/// It panicked.
pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Panic> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| Panic::of(&*payload))
}

/// [`catch`] for a future.
///
/// # Errors
/// It panicked.
pub async fn catch_async<T>(work: impl Future<Output = T>) -> Result<T, Panic> {
    AssertUnwindSafe(work).catch_unwind().await.map_err(|payload| Panic::of(&*payload))
}

impl Panic {
    fn of(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        Self(text[..text.floor_char_boundary(MAX_MESSAGE)].to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_becomes_an_error_with_its_message() {
        assert_eq!(catch(|| 1), Ok(1));
        assert_eq!(catch(|| panic!("why")), Err::<(), _>(Panic("why".into())));
        let long = "é".repeat(MAX_MESSAGE);
        let caught = catch_async(async { panic!("{long}") }).await;
        assert_eq!(caught, Err::<(), _>(Panic("é".repeat(MAX_MESSAGE / 2))));
    }
}
