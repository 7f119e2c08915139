use super::*;
use crate::test_support::consolidation_world;
use crate::test_support::failures::transcript;

async fn passed(ctx: Arc<Context>) -> String {
    format!("last {}", pass(&ctx, "").await)
}

/// A node that another controller launched has no annotation.
#[tokio::test]
async fn a_missing_price_is_written_under_every_failure() {
    let world = || {
        let world = consolidation_world::world(&["p"], "100%");
        consolidation_world::add(&world, "x", "p", None, "100m");
        world
    };
    insta::assert_snapshot!(transcript(world, passed).await, @r#"
    undisturbed: last x
      PATCH nodeclaims/x {"metadata":{"annotations":{"stowage.dev/usd-per-hour":"0.096"}}}
      PATCH nodes/x {"metadata":{"annotations":{"stowage.dev/usd-per-hour":"0.096"}}}
      changes nodeclaims/x (metadata.annotations), nodes/x (metadata.annotations)
    again: last , no write, as undisturbed
    PATCH nodeclaims/x
      written by another | lost answer: last x; again: last , no write, as undisturbed
      409 | 422: last x; again: last x, 1 write, as undisturbed
      404: last x; again: last , no write, differs: -nodeclaims/x
      429, Retry-After 2 s, once: last x, sent 2 times in 2 s; again: last , no write, as undisturbed
      504: last x, sent 7 times; again: last x, 1 write, as undisturbed
      no answer: waits forever; again: last x, 2 writes, as undisturbed
      crash before: stopped; again: last x, 2 writes, as undisturbed
      crash after: stopped; again: last x, 1 write, as undisturbed
    PATCH nodes/x
      written by another | lost answer: last x; again: last , no write, as undisturbed
      409 | 422: last x; again: last x, 1 write, as undisturbed
      404: last x; again: last , no write, differs: -nodes/x
      429, Retry-After 2 s, once: last x, sent 2 times in 2 s; again: last , no write, as undisturbed
      504: last x, sent 7 times; again: last x, 1 write, as undisturbed
      no answer: waits forever; again: last x, 1 write, as undisturbed
      crash before: stopped; again: last x, 1 write, as undisturbed
      crash after: stopped; again: last , no write, as undisturbed
    "#);
}
