use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

#[tokio::test]
async fn a_cloud_that_is_not_available_is_tried_again_until_it_is() {
    let (tries, failed) = (AtomicU64::new(0), IntCounter::new("f", "f").unwrap());
    let attempt = || {
        let tried = tries.fetch_add(1, Ordering::SeqCst);
        async move { if tried == 3 { Ok("connected") } else { Err("no route") } }
    };
    let waits = (Duration::from_millis(1), Duration::from_millis(2));
    assert_eq!(retried("connecting", waits, &failed, attempt).await, "connected");
    assert_eq!(failed.get(), 3);
}
