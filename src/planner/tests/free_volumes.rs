//! Free volumes of single nodes and of zones, and their assignment to claims.

use serde_json::{Value, json};

use crate::columns::table::ColumnCache;
use crate::input::volumes::objects::Volume;
use crate::test_support::{HOST, World, reason};
use crate::tests::volumes::{claim, claims, class, volumes};

/// A free volume of class `local` on a node; `spec` is merged into its spec.
fn local_volume(world: &mut World, name: &str, host: &str, extra: &Value) {
    let mut object = json!({"metadata": {"labels": {"disk": "fast"}}, "spec": {"storageClassName": "local",
        "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteOnce"], "nodeAffinity": {"required": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": HOST, "operator": "In", "values": [host]}]}]}}}});
    object["spec"].as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let volume = Volume::new(&serde_json::from_value(object).unwrap()).unwrap();
    volumes(world).volumes.insert(name.into(), volume);
}

fn local_class(world: &mut World) {
    let local = json!({"provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer"});
    class(world, "local", &local);
}

fn local_claim(world: &mut World, name: &str, extra: &Value) {
    let mut object = json!({"spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}}}});
    object["spec"].as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    claim(world, name, &object);
}

#[test]
fn a_free_volume_serves_a_claim_that_it_satisfies() {
    let none = json!({});
    for (of_claim, of_volume, serves) in [
        (none.clone(), none.clone(), true),
        (json!({"resources": {"requests": {"storage": "10000Mi"}}}), none.clone(), true),
        (json!({"resources": {"requests": {"storage": "11Gi"}}}), none.clone(), false),
        (json!({"accessModes": ["ReadWriteMany"]}), none.clone(), false),
        (json!({"accessModes": ["ReadWriteMany"]}), json!({"accessModes": ["ReadWriteOnce", "ReadWriteMany"]}), true),
        (json!({"volumeMode": "Block"}), none.clone(), false),
        (json!({"volumeMode": "Block"}), json!({"volumeMode": "Block"}), true),
        (none.clone(), json!({"storageClassName": "other"}), false),
        (none.clone(), json!({"claimRef": {"name": "else"}}), false),
        (json!({"selector": {"matchLabels": {"disk": "fast"}}}), none.clone(), true),
        (json!({"selector": {"matchLabels": {"disk": "slow"}}}), none.clone(), false),
    ] {
        let mut world = World::new();
        local_class(&mut world);
        world.node("n", "z-a", 8, &[]);
        local_volume(&mut world, "pv", "n", &of_volume);
        local_claim(&mut world, "data", &of_claim);
        world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
        let plan = crate::plan(&world.problem, &ColumnCache::default());
        assert_eq!(plan.unschedulable.is_empty(), serves, "{of_claim} of {of_volume}");
        assert!(serves || reason(&plan).contains("is free for PersistentVolumeClaim default/data"));
    }
}

#[test]
fn a_free_volume_serves_one_claim_and_a_pods_volumes_share_a_node() {
    let mut world = World::new();
    local_class(&mut world);
    // Node `full` has no room, `m` has two volumes, `n` one; four pods of a volume each, of which one is left out.
    world.node("full", "z-a", 1, &[(&json!({}), &json!({}))]);
    for (host, disks) in [("full", 1), ("m", 2), ("n", 1)] {
        if host != "full" {
            world.node(host, "z-a", 8, &[]);
        }
        (0..disks).for_each(|disk| local_volume(&mut world, &format!("{host}-{disk}"), host, &json!({})));
    }
    for pod in 0..4 {
        local_claim(&mut world, &format!("data-{pod}"), &json!({}));
        world.pods(&format!("p{pod}"), 1, &json!({}), "1", "1Gi", &claims(&[&format!("data-{pod}")]));
    }
    let plan = crate::plan(&world.problem, &ColumnCache::default());
    let placed: Vec<(usize, usize)> = plan.placements.iter().map(|p| (p.node, p.pods.len())).collect();
    assert_eq!((placed, plan.new_nodes.len(), plan.unschedulable.len()), (vec![(1, 2), (2, 1)], 0, 1));

    // Two pods of two volumes each: each pod's are on one node.
    let mut world = World::new();
    local_class(&mut world);
    for host in ["m", "n"] {
        world.node(host, "z-a", 8, &[]);
    }
    for (name, host) in [("a", "m"), ("b", "n"), ("c", "m"), ("d", "n")] {
        local_volume(&mut world, name, host, &json!({}));
    }
    for pod in 0..2 {
        let names = [format!("data-{pod}"), format!("log-{pod}")];
        for name in &names {
            local_claim(&mut world, name, &json!({}));
        }
        world.pods(&format!("p{pod}"), 1, &json!({}), "1", "1Gi", &claims(&[&names[0], &names[1]]));
    }
    let plan = crate::plan(&world.problem, &ColumnCache::default());
    assert_eq!(plan.placements.iter().map(|p| (p.node, p.pods.len())).collect::<Vec<_>>(), [(0, 1), (1, 1)]);
}

#[test]
fn free_volumes_of_a_zone_serve_pods_that_may_run_there() {
    let mut world = World::new();
    local_class(&mut world);
    // In the order of their names, the volumes do not match the pods.
    for (name, zone) in [("a", "z-b"), ("b", "z-a")] {
        let terms =
            json!([{"matchExpressions": [{"key": crate::test_support::ZONE, "operator": "In", "values": [zone]}]}]);
        local_volume(&mut world, name, "none", &json!({"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}));
    }
    for (pod, zone) in [("p", "z-a"), ("q", "z-b")] {
        local_claim(&mut world, &format!("data-{pod}"), &json!({}));
        let mut spec = claims(&[&format!("data-{pod}")]);
        spec["nodeSelector"] = json!({crate::test_support::ZONE: zone});
        world.pods(pod, 1, &json!({}), "1", "1Gi", &spec);
    }
    let plan = crate::plan(&world.problem, &ColumnCache::default());
    assert!(plan.unschedulable.is_empty(), "{}", reason(&plan));
    assert_eq!(plan.new_nodes.len(), 2);
}
