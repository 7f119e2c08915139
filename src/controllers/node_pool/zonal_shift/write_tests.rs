use serde_json::json;
use stowage_test_objects::{node_class, node_pool};

use super::*;
use crate::decisions::placement::mode::PlacementMode;
use crate::test_support::failures::first_turn;
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};
use crate::test_support::scripted_cloud::FakeCloud;

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

#[tokio::test]
async fn a_refused_event_is_written_later() {
    let api = api();
    api.inject(Fault::Refused(Refusal::invalid("no")), 1, |_| true);
    let ctx = api.context(shifted(), PlacementMode::Nominate);
    let (mut reports, now, zones) = (Reports::default(), clock::now(), BTreeSet::from(["z-a".to_owned()]));
    let mut written = Vec::new();
    for seconds in [0, 5, 10, 15, 300] {
        reports.pass(&ctx, &zones, now + Duration::from_secs(seconds)).await;
        written.push(api.events().len());
        api.reset();
        if seconds == 0 {
            assert_eq!(reports.shifted, BTreeSet::new(), "refused");
        }
    }
    assert_eq!(written, [1, 0, 1, 0, 0], "refused, too early, written, and not repeated");
    reports.pass(&ctx, &BTreeSet::new(), now).await;
    assert!(api.events()[0].starts_with("Normal ZonalShiftCleared on NodePool/there"));
}
