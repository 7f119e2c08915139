use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_test_objects::{claim, node_pool};

use super::*;
use crate::controllers::disruption::roll_back::{RETRY, abandon};
use crate::test_support::consolidation_world::{add, world};
use crate::test_support::failures::World;
use crate::test_support::kubernetes::Fault;

fn mark_of(world: &World, claim: &str) -> Value {
    world.api.stored(&format!("nodeclaims/{claim}")).unwrap()["metadata"]["annotations"][labels::DISRUPTING].clone()
}

#[tokio::test]
async fn drifted_and_underutilized_nodes_are_disrupted_in_one_pass_within_one_budget() {
    for (pools, budget, marks) in [
        (["p", "q"], "100%", [json!("Drifted/"), json!("Underutilized/"), Value::Null]),
        // One of three nodes.
        (["p", "p"], "1", [json!("Drifted/"), Value::Null, Value::Null]),
        (["p", "q"], "1", [json!("Drifted/"), json!("Underutilized/"), Value::Null]),
    ] {
        let world = world(&pools, budget);
        let [first, second] = pools;
        add(&world, "drifted", first, Some("Drifted"), "1500m");
        add(&world, "light", second, None, "100m");
        add(&world, "other", second, None, "1500m");
        let ctx = world.context();
        Replacement::new(&ctx).pass(&ctx).await;
        assert_eq!(["drifted", "light", "other"].map(|name| mark_of(&world, name)), marks, "{pools:?} {budget}");
    }
}

/// Gives a node a lifetime of which this part is over.
fn age(world: &World, name: &str, percent: u64) {
    let mut claim = world.api.stored(&format!("nodeclaims/{name}")).unwrap();
    claim["metadata"]["creationTimestamp"] = json!((clock::now() - Duration::from_mins(percent)).rfc3339());
    claim["spec"]["expireAfter"] = json!("100m");
    world.api.put(&serde_json::from_value::<NodeClaim>(claim).unwrap());
}

#[tokio::test]
async fn nodes_that_expire_soon_are_replaced_after_drifted_ones_within_one_budget() {
    for (budget, ages, marks) in [
        ("100%", [95, 80], [json!("Drifted/"), json!("Expired/"), Value::Null]),
        ("100%", [80, 91], [json!("Drifted/"), Value::Null, json!("Expired/")]),
        ("2", [91, 95], [json!("Drifted/"), Value::Null, json!("Expired/")]),
        ("1", [91, 95], [json!("Drifted/"), Value::Null, Value::Null]),
    ] {
        let world = world(&["p"], budget);
        add(&world, "drifted", "p", Some("Drifted"), "1500m");
        for (name, percent) in ["first", "second"].into_iter().zip(ages) {
            add(&world, name, "p", None, "1500m");
            age(&world, name, percent);
        }
        let ctx = world.context();
        Replacement::new(&ctx).pass(&ctx).await;
        assert_eq!(["drifted", "first", "second"].map(|name| mark_of(&world, name)), marks, "{ages:?} {budget}");
    }
}

#[tokio::test]
async fn a_node_that_expires_soon_and_cannot_be_replaced_is_reported() {
    let world = world(&["p"], "100%");
    add(&world, "old", "p", None, "1500m");
    age(&world, "old", 95);
    let mut pod = world.api.stored("pods/n/on-old").unwrap();
    pod["metadata"]["annotations"] = json!({(labels::DO_NOT_DISRUPT): "true"});
    world.api.put(&serde_json::from_value::<Pod>(pod).unwrap());
    let ctx = world.context();
    let mut replacement = Replacement::new(&ctx);
    assert_eq!(replacement.pass(&ctx).await, 0);
    let events = events(&world, 2).await;
    let note = "but can't be disrupted now: pod n/on-old has the annotation karpenter.sh/do-not-disrupt";
    for about in ["NodeClaim/old", "Node/old"] {
        let reports = |line: &&str| line.contains(about) && line.contains("expires at 20") && line.contains(note);
        assert_eq!(events.lines().filter(reports).count(), 1, "{events}");
    }
}

#[tokio::test]
async fn pods_move_to_no_node_that_is_replaced_next() {
    let world = world(&["p"], "1");
    for (name, condition) in [("a", Some("Drifted")), ("b", Some("Drifted")), ("c", None)] {
        add(&world, name, "p", condition, "100m");
    }
    let ctx = world.context();
    assert_eq!(Replacement::new(&ctx).pass(&ctx).await, 1);
    assert_eq!(mark_of(&world, "a"), json!("Drifted/"));
    let planned = |name: &str| {
        world.api.stored(&format!("nodeclaims/{name}")).unwrap()["metadata"]["annotations"][labels::PLANNED_PODS]
            .clone()
    };
    assert_eq!([planned("b"), planned("c")], [Value::Null, json!("[\"n/on-a\"]")]);
}

#[tokio::test]
async fn a_node_that_was_given_up_is_not_chosen_again() {
    for given_up in [false, true] {
        let world = world(&["p"], "100%");
        add(&world, "light", "p", None, "100m");
        add(&world, "drifted", "p", Some("Drifted"), "100m");
        add(&world, "other", "p", None, "1500m");
        let ctx = world.context();
        if given_up {
            abandon(&ctx, ["light", "drifted", "other"].map(str::to_owned).to_vec(), RETRY);
        }
        let count = Replacement::new(&ctx).pass(&ctx).await;
        assert_eq!(count > 0, !given_up);
        assert!(lock(&ctx.abandoned).is_empty());
    }
}

#[tokio::test]
async fn an_invalid_annotation_of_a_node_pool_is_reported() {
    let world = world(&["p"], "100%");
    let annotations = json!({(labels::CONSOLIDATION_PAYBACK): "soon"});
    world.api.put(&node_pool("p", &json!({"metadata": {"annotations": annotations}})));
    let ctx = world.context();
    let mut replacement = Replacement::new(&ctx);
    replacement.pass(&ctx).await;
    while world.api.events().is_empty() {
        tokio::task::yield_now().await;
    }
    let events = world.api.events().join("\n");
    let note = "annotation stowage.dev/consolidation-payback: 'soon' is not a duration of at least 1m, such as 30m";
    assert!(events.contains("InvalidConsolidationSetting") && events.contains(note), "{events}");
}

#[tokio::test]
async fn the_next_pass_is_due_when_a_node_may_be_removed() {
    let world = world(&["p"], "100%");
    let ctx = world.context();
    let mut replacement = Replacement::new(&ctx);
    let now = UnixMillis(1_000_000);
    for (next, expected) in [
        (None, PACE.resync),
        (Some(now + Duration::from_secs(3)), Duration::from_secs(3)),
        (Some(now + Duration::from_hours(1)), PACE.resync),
        (Some(now - Duration::from_secs(1)), PACE.resync),
    ] {
        for (eligible, outdated) in [(next, None), (None, next), (next, Some(now + Duration::from_mins(1)))] {
            (replacement.consolidation.next_eligible, replacement.next_outdated) = (eligible, outdated);
            assert_eq!(replacement.wait(now), expected, "{eligible:?} {outdated:?}");
        }
    }
}

/// Events of these passes, once at least `count` were written.
async fn events(world: &World, count: usize) -> String {
    for _ in 0..10_000 {
        if world.api.events().len() >= count {
            break;
        }
        tokio::task::yield_now().await;
    }
    world.api.events().join("\n")
}

#[tokio::test]
async fn the_reason_why_a_node_stays_is_reported_once_on_node_and_claim() {
    let world = world(&["p"], "100%");
    add(&world, "full", "p", None, "1900m");
    let ctx = world.context();
    let mut replacement = Replacement::new(&ctx);
    for _ in 0..3 {
        assert_eq!(replacement.pass(&ctx).await, 0);
    }
    let events = events(&world, 2).await;
    for about in ["NodeClaim/full", "Node/full"] {
        let of_it: Vec<&str> = events.lines().filter(|line| line.contains(about)).collect();
        assert_eq!(of_it.len(), 1, "{events}");
        assert!(
            of_it[0].contains("Unconsolidatable") && of_it[0].contains("can't replace with a cheaper node"),
            "{events}"
        );
    }
    let stays = lock(&ctx.last_consolidation).clone().unwrap().verdicts;
    assert_eq!(stays, [("saves_too_little", 1)].into());
    assert_eq!(ctx.metrics.consolidation_nodes.with_label_values(&["saves_too_little"]).get(), 1);
    // The pod ends, and the loop of empty nodes removes the node.
    ctx.cluster.update(|state| state.delete_pod("n/on-full", clock::now()));
    replacement.pass(&ctx).await;
    assert_eq!(ctx.metrics.consolidation_nodes.with_label_values(&["saves_too_little"]).get(), 0);
}

#[tokio::test]
async fn a_budget_that_allows_no_disruption_is_reported_on_the_node_pool() {
    let world = world(&["p"], "0");
    add(&world, "light", "p", None, "100m");
    let ctx = world.context();
    let mut replacement = Replacement::new(&ctx);
    replacement.pass(&ctx).await;
    let events = events(&world, 3).await;
    for reason in ["Empty", "Drifted", "Underutilized"] {
        let note = format!("no allowed disruptions for reason {reason}: a budget allows none");
        assert!(events.lines().any(|line| line.contains("NodePool/p") && line.contains(&note)), "{events}");
    }
}

#[tokio::test]
async fn f23_events_that_are_not_stored_delay_no_decision() {
    let world = world(&["p"], "100%");
    world.api.inject(Fault::NoAnswer, usize::MAX, |request| request.key.resource == "events");
    for n in 0..200 {
        let name = format!("full{n:03}");
        add(&world, &name, "p", None, "1900m");
    }
    let ctx = world.context();
    let mut replacement = Replacement::new(&ctx);
    for _ in 0..2 {
        assert_eq!(replacement.pass(&ctx).await, 0);
    }
}

#[tokio::test]
async fn disruption_that_is_only_reported_changes_nothing() {
    use DisruptionReason::{Drifted, Empty, Expired, Underutilized};
    let world = world(&["p", "q"], "100%");
    add(&world, "drifted", "p", Some("Drifted"), "1500m");
    add(&world, "light", "q", None, "100m");
    add(&world, "other", "q", None, "1500m");
    add(&world, "empty", "p", None, "100m");
    let mut aged = claim("aged", &json!({}));
    aged.metadata.creation_timestamp = Some(Time("2026-01-01T00:00:00Z".parse().unwrap()));
    aged.spec.expire_after = Some("1h".to_owned());
    world.api.put(&aged);
    let ctx = world.context();
    ctx.cluster.update(|state| {
        state.delete_pod("n/on-empty", clock::now());
        state.pause = Some(Pause::of(&[("disruption".to_owned(), "report".to_owned())].into()));
    });
    let mut replacement = Replacement::new(&ctx);
    for _ in 0..2 {
        assert_eq!(replacement.pass(&ctx).await, 0);
    }
    let expected = [("aged", Expired), ("drifted", Drifted), ("empty", Empty), ("light", Underutilized)];
    assert_eq!(*lock(&ctx.reported), expected.map(|(claim, reason)| (claim.to_owned(), reason)).into());
    // Two more say why consolidation would keep the drifted node.
    let events = events(&world, 9).await;
    assert_eq!(world.api.writes().len(), 0);
    for (about, reason) in [
        ("NodeClaim/aged", "Expired"),
        ("NodeClaim/drifted", "Drifted"),
        ("Node/drifted", "Drifted"),
        ("Node/empty", "Empty"),
        ("NodeClaim/light", "Underutilized"),
    ] {
        let of_it: Vec<&str> =
            events.lines().filter(|line| line.contains("Reported") && line.contains(about)).collect();
        let expected = format!("node stays: disruption is only reported; it would be disrupted now as {reason}");
        assert!(of_it.len() == 1 && of_it[0].contains(&expected), "{about}: {of_it:?}");
    }
    // The report ends with the pause.
    ctx.cluster.update(|state| state.pause = Some(Pause::parse(Some("disruption"))));
    assert_eq!(replacement.pass(&ctx).await, 0);
    assert!(lock(&ctx.reported).is_empty() && world.api.writes().is_empty());
    ctx.cluster.update(|state| state.pause = Some(Pause::default()));
    assert_eq!(replacement.pass(&ctx).await, 2);
}
