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
    PATCH nodes/x
    "#);
}
