use serde_json::json;
use stowage_test_objects::node_class;

use super::*;
use crate::decisions::placement::mode::PlacementMode;
use crate::test_support::failures::first_turn;
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::scripted_cloud::FakeCloud;

#[tokio::test]
async fn every_class_gets_an_event_for_an_api_that_can_not_be_read() {
    let failing_apis = [(OptionalApi::SpotPrices, "refused".to_owned())].into();
    let api = FakeApi::default();
    let cloud = Arc::new(FakeCloud { failing_apis, ..FakeCloud::default() });
    let nobody = api.context(Arc::clone(&cloud) as Arc<_>, PlacementMode::Nominate);
    first_turn(run(nobody)).await;
    assert_eq!(api.events(), Vec::<String>::new(), "there is no class to report it on");
    for name in ["a", "b"] {
        api.put(&node_class(name, &json!({})));
    }
    first_turn(run(api.context(cloud, PlacementMode::Nominate))).await;
    let events = ["a", "b"].map(|name| format!("Warning SpotPricesUnreadable on EC2NodeClass/{name}: refused"));
    assert_eq!(api.events(), events);
    assert!(api.lines().is_empty());
}
