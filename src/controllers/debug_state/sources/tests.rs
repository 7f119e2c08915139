//! What a leader gathers, from a context with the fake API server.

use serde_json::{Value, json};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_test_objects as objects;

use super::*;
use crate::controllers::disruption::consolidation;
use crate::controllers::event_queue::EventQueue;
use crate::decisions::disruption::consolidation::Memory;
use crate::decisions::disruption::verdicts::Reports;
use crate::decisions::provisioning::supply_quarantine::Source;
use crate::test_support::failures::World;
use crate::test_support::kubernetes::FakeApi;

fn document(sources: &DebugSources, now: UnixMillis) -> Value {
    serde_json::from_slice(&sources.document(Process::default(), now)).unwrap()
}

#[tokio::test]
async fn the_leader_adds_its_caps_its_quarantine_and_its_last_decisions() {
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let api = FakeApi::default();
    api.put(&objects::pod("a", &json!({"status": {"conditions": [condition]}})));
    let world = World::new(api);
    let ctx = world.context();
    let sources = DebugSources::new(Arc::clone(&ctx.cluster), Arc::clone(&ctx.derived));
    let now = clock::now();
    assert_eq!((&document(&sources, now)["leader"], &document(&sources, now)["holds"]), (&Value::Null, &Value::Null));
    sources.set_leader(&ctx);
    assert_eq!(ctx.admit(Capped::Purchase, 2).await, 2);
    lock(&ctx.supply_quarantine).add(Source::NodePool("p".into()), Some(1), false, now);
    let class = ctx.cluster.read().pods["n/a"].entry.as_ref().map(|entry| Arc::clone(&entry.class)).unwrap();
    lock(&ctx.quarantine).add(&class, Cause::NodeClaimRejected, now);
    ctx.cluster
        .update(|state| state.apply_pod(&objects::pod("b", &json!({"status": {"conditions": [condition]}})), now));
    let (memory, queue) = (&mut Memory::default(), EventQueue::start(&ctx));
    let chosen = consolidation::choose(memory, &mut Reports::default(), &ctx, &Arc::default(), &queue).await;
    assert!(chosen.is_empty());
    ctx.derived.holds(&ctx.cluster.read(), now);
    let shown = document(&sources, now);
    let (leader, most) = (&shown["leader"], ctx.settings.max_purchases_per_minute);
    assert_eq!(leader["caps"][0], json!({"action": "purchase", "per_minute": most, "left": most - 2}));
    assert_eq!(leader["caps"][1]["action"], "disruption");
    assert_eq!(leader["quarantined_supply"]["items"][0]["name"], "p");
    assert_eq!(leader["quarantined_pod_classes"]["items"][0]["cause"], "nodeclaim_rejected");
    assert_eq!(shown["pending_pods"]["items"][0]["reason"], json!({"quarantined": "nodeclaim_rejected"}));
    assert_eq!(leader["last_consolidation"]["waits"], false);
    assert_eq!((&leader["last_plan"], shown["holds"]["items"].clone()), (&Value::Null, json!([])));
    drop((queue, ctx));
    tokio::task::yield_now().await;
    assert_eq!(document(&sources, now)["leader"], Value::Null, "nothing is kept of a leader that ended");
}
