use serde_json::json;

use super::*;
use crate::decisions::placement::mode::PlacementMode;
use crate::test_support::cloud::FakeCloud;
use crate::test_support::failures::first_turn;
use crate::test_support::kubernetes::store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};
use crate::test_support::objects::{node_class, node_pool};

fn api() -> FakeApi {
    let api = FakeApi::default();
    let subnets = json!([{"id": "s", "zone": "z-a", "zoneID": "id-a"}]);
    api.put(&node_class("default", &json!({"status": {"subnets": subnets}})));
    for (name, zone) in [("there", "z-a"), ("elsewhere", "z-b")] {
        let requirements = json!([{"key": labels::ZONE, "operator": "In", "values": [zone]}]);
        api.put(&node_pool(name, &json!({"spec": {"template": {"spec": {"requirements": requirements}}}})));
    }
    api
}

fn shifted() -> Arc<FakeCloud> {
    Arc::new(FakeCloud { shifted_zones: ["z-a".to_owned()].into(), ..FakeCloud::default() })
}

#[tokio::test]
async fn pools_of_a_shifted_zone_get_an_event() {
    let api = api();
    let ctx = api.context(shifted(), PlacementMode::Nominate);
    first_turn(run(Arc::clone(&ctx))).await;
    let events = api.events();
    assert_eq!(events.len(), 1);
    assert!(events[0].starts_with("Warning ZonalShiftActive on NodePool/there: "), "{events:?}");
    assert!(api.lines().is_empty());
}

/// DEFECT: an event that the API server refuses is not repeated.
#[tokio::test]
async fn a_refused_event_is_lost() {
    let api = api();
    api.inject(Fault::Refused(Refusal::invalid("no")), 1, |_| true);
    let ctx = api.context(shifted(), PlacementMode::Nominate);
    first_turn(run(Arc::clone(&ctx))).await;
    api.reset();
    first_turn(run(ctx)).await;
    assert_eq!(api.events(), Vec::<String>::new(), "DEFECT: the refused event counts as written");
    first_turn(run(api.context(shifted(), PlacementMode::Nominate))).await;
    assert_eq!(api.events().len(), 1, "a new process writes it");
}
