//! Behaviors 19 to 22: volumes.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::columns::table::ColumnCache;
use crate::input::volumes::objects::{Claim, StorageClass, Volume, Volumes, attach_limits};
use crate::test_support::{HOST, World, ZONE, reason, spread, types, zones};

const EBS: &str = "ebs.csi.aws.com";

/// A pod's volumes, by claim.
pub(crate) fn claims(names: &[&str]) -> Value {
    let volumes: Vec<Value> =
        names.iter().map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}})).collect();
    json!({"volumes": volumes})
}

pub(crate) fn volumes(world: &mut World) -> &mut Volumes {
    Arc::make_mut(&mut world.problem.volumes)
}

pub(crate) fn class(world: &mut World, name: &str, object: &Value) {
    let class = StorageClass::new(&serde_json::from_value(object.clone()).unwrap());
    volumes(world).classes.insert(name.into(), class);
}

pub(crate) fn waiting_class(world: &mut World) {
    class(world, "gp3", &json!({"provisioner": EBS, "volumeBindingMode": "WaitForFirstConsumer"}));
}

pub(crate) fn claim(world: &mut World, name: &str, object: &Value) {
    let claim = Claim::new(&serde_json::from_value(object.clone()).unwrap());
    volumes(world).claims.insert(format!("default/{name}"), claim);
}

pub(crate) fn unbound(world: &mut World, name: &str) {
    claim(world, name, &json!({"spec": {"storageClassName": "gp3"}}));
}

/// A claim bound to a volume of its own with this node affinity.
pub(crate) fn bound(world: &mut World, name: &str, expressions: &Value) {
    claim(
        world,
        name,
        &json!({"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
            "spec": {"storageClassName": "gp3", "volumeName": format!("pv-{name}")}}),
    );
    let volume = json!({"spec": {"csi": {"driver": EBS, "volumeHandle": "v"}, "claimRef": {"name": name}, "nodeAffinity": {
        "required": {"nodeSelectorTerms": [{"matchExpressions": expressions}]}}}});
    let volume = Volume::new(&serde_json::from_value(volume).unwrap()).unwrap();
    volumes(world).volumes.insert(format!("pv-{name}"), volume);
}

pub(crate) fn in_zone(zone: &str) -> Value {
    json!([{"key": "topology.ebs.csi.aws.com/zone", "operator": "In", "values": [zone]}])
}

#[test]
fn b19_a_csi_attach_limit_opens_a_second_node() {
    for (pods, each, nodes) in [(6, 1, 1), (7, 1, 2), (4, 3, 2)] {
        let mut world = World::with_pools(&[(
            "small",
            json!({"requirements": [{"key": "karpenter.k8s.aws/instance-cpu", "operator": "In", "values": ["2"]}]}),
        )]);
        waiting_class(&mut world);
        for pod in 0..pods {
            let names: Vec<String> = (0..each).map(|n| format!("data-{pod}-{n}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            for name in &names {
                unbound(&mut world, name);
            }
            world.pods(&format!("p{pod}"), 1, &json!({}), "100m", "64Mi", &claims(&names));
        }
        let plan = world.plan();
        assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (nodes, 0), "{pods} pods of {each} volumes");
        assert!(plan.new_nodes[0].requests.extended.is_empty(), "volumes are no resource of the NodeClaim");
    }
}

#[test]
fn b19_the_limit_of_an_existing_node_counts_each_attached_volume_once() {
    let mut world = World::new();
    waiting_class(&mut world);
    let shared = claims(&["shared"]);
    let running = json!({"app": "running"});
    world.node("n", "z-a", 8, &[(&running, &shared), (&running, &shared), (&running, &json!({}))]);
    volumes(&mut world).limits.insert("n".into(), BTreeMap::from([(Arc::from(EBS), 3)]));
    bound(&mut world, "shared", &in_zone("z-a"));
    for pod in 0..4 {
        unbound(&mut world, &format!("data-{pod}"));
        world.pods(&format!("p{pod}"), 1, &json!({}), "100m", "64Mi", &claims(&[&format!("data-{pod}")]));
    }
    let plan = world.plan();
    assert_eq!((plan.placements[0].pods.len(), plan.new_nodes.len()), (2, 1));
    // Without a CSINode, the limit of its instance type applies, if there is one.
    volumes(&mut world).limits.clear();
    assert_eq!(world.plan().placements[0].pods.len(), 4);
    world.at(0).labels.insert("node.kubernetes.io/instance-type".into(), "m1.x2".into());
    let extra: Vec<String> = (0..4).map(|n| format!("more-{n}")).collect();
    for name in &extra {
        unbound(&mut world, name);
    }
    let extra: Vec<&str> = extra.iter().map(String::as_str).collect();
    world.pods("more", 1, &json!({}), "100m", "64Mi", &claims(&extra));
    let plan = crate::plan(&world.problem, &ColumnCache::default());
    let on_node: usize = plan.placements[0].pods.iter().map(|pod| world.problem.pods[*pod].claims.len()).sum();
    assert_eq!((on_node, plan.new_nodes.len()), (5, 1), "an m1.x2 attaches 6 volumes, one is attached");
}

#[test]
fn a_claim_of_several_pods_counts_once_on_each_node() {
    let small = json!({"requirements": [{"key": "karpenter.k8s.aws/instance-cpu", "operator": "In", "values": ["2"]}]});
    let mut world = World::with_pools(&[("small", small)]);
    waiting_class(&mut world);
    bound(&mut world, "shared", &in_zone("z-a"));
    // Six volumes are the limit of the type: the shared one, and five others.
    for pod in 0..15 {
        let own = format!("data-{pod}");
        unbound(&mut world, &own);
        let names: &[&str] = if pod < 5 { &["shared", &own] } else { &["shared"] };
        world.pods(&format!("p{pod}"), 1, &json!({}), "100m", "64Mi", &claims(names));
    }
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (1, 0));
    // A node that has it attached has room for one more.
    let mut world = World::default();
    waiting_class(&mut world);
    bound(&mut world, "shared", &in_zone("z-a"));
    for (name, running) in [("with", claims(&["shared"])), ("without", json!({}))] {
        world.node(name, "z-a", 8, &[(&json!({}), &running)]);
        volumes(&mut world).limits.insert(name.into(), BTreeMap::from([(Arc::from(EBS), 4)]));
    }
    for pod in 0..6 {
        let own = format!("data-{pod}");
        unbound(&mut world, &own);
        world.pods(&format!("p{pod}"), 1, &json!({}), "100m", "64Mi", &claims(&["shared", &own]));
    }
    let plan = world.plan();
    assert_eq!((plan.placements.len(), plan.unschedulable.len()), (2, 0), "{:?}", plan.unschedulable);
}

#[test]
fn b20_a_bound_volume_restricts_the_pod_to_its_zone() {
    let mut world = World::new();
    bound(&mut world, "data", &in_zone("z-c"));
    world.node("n", "z-a", 8, &[]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
    let plan = world.plan();
    assert_eq!(zones(&plan).into_keys().collect::<Vec<_>>(), ["z-c"], "the room in z-a is not used");
    assert!(plan.new_nodes[0].choices.iter().all(|c| &*c.zone == "z-c"));

    let mut world = World::new();
    bound(&mut world, "data", &in_zone("z-elsewhere"));
    world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
    let text = reason(&world.plan()).to_owned();
    assert!(text.contains("its volumes ask for topology.kubernetes.io/zone In [z-elsewhere]"), "{text}");

    // A volume from before volumes had node affinity: its label names the zone.
    let mut world = World::new();
    bound(&mut world, "data", &json!([{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]));
    let labeled = json!({"metadata": {"labels": {"failure-domain.beta.kubernetes.io/zone": "z-b"}},
        "spec": {"awsElasticBlockStore": {"volumeID": "v"}}});
    let labeled = Volume::new(&serde_json::from_value(labeled).unwrap()).unwrap();
    assert_eq!(labeled.driver.as_deref(), Some(EBS));
    volumes(&mut world).volumes.insert("pv-data".into(), labeled);
    world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
    assert_eq!(zones(&world.plan()).into_keys().collect::<Vec<_>>(), ["z-b"]);
}

#[test]
fn b21_wait_for_first_consumer_follows_the_storage_class_topology() {
    let topologies = |zones: &[&str]| json!([{"matchLabelExpressions": [{"key": ZONE, "values": zones}]}]);
    for (mode, allowed, want) in [
        ("WaitForFirstConsumer", json!(null), Ok("z-a")),
        ("WaitForFirstConsumer", topologies(&["z-b"]), Ok("z-b")),
        ("WaitForFirstConsumer", topologies(&["nowhere"]), Err("ask for topology.kubernetes.io/zone In [nowhere]")),
        ("Immediate", json!(null), Err("is not bound yet")),
    ] {
        let mut world = World::new();
        class(&mut world, "gp3", &json!({"provisioner": EBS, "volumeBindingMode": mode, "allowedTopologies": allowed}));
        unbound(&mut world, "data");
        world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
        let plan = world.plan();
        match want {
            Ok(zone) => assert!(zones(&plan).contains_key(zone), "{allowed}: {:?}", zones(&plan)),
            Err(text) => {
                assert!(reason(&plan).contains(text), "{}", reason(&plan));
                assert!(plan.new_nodes.is_empty(), "no node would help");
            }
        }
    }
}

#[test]
fn b22_a_missing_claim_is_reported_and_other_pods_are_planned() {
    let bind_completed = json!({"annotations": {"pv.kubernetes.io/bind-completed": "yes"}});
    let deleting = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
    for (object, want) in [
        (None, "PersistentVolumeClaim default/data does not exist"),
        (Some(json!({"metadata": deleting, "spec": {"storageClassName": "gp3"}})), "is being deleted"),
        (Some(json!({"spec": {"storageClassName": "gp3"}, "status": {"phase": "Lost"}})), "has lost its volume"),
        (
            Some(json!({"metadata": bind_completed, "spec": {"volumeName": "pv-gone"}})),
            "bound to PersistentVolume pv-gone, which does not exist",
        ),
        (Some(json!({"spec": {"volumeName": "pv-gone", "storageClassName": "gp3"}})), "is not bound yet"),
        (Some(json!({"spec": {"storageClassName": ""}})), "is not bound and has no StorageClass"),
        (Some(json!({"spec": {}})), "is not bound and has no StorageClass"),
        (Some(json!({"spec": {"storageClassName": "gone"}})), "of StorageClass gone, which does not exist"),
        (Some(json!({"spec": {"storageClassName": "local"}})), "no PersistentVolume of StorageClass local is free"),
    ] {
        let mut world = World::new();
        waiting_class(&mut world);
        let local = json!({"provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer"});
        class(&mut world, "local", &local);
        if let Some(object) = object {
            claim(&mut world, "data", &object);
        }
        world.pods("other", 1, &json!({}), "1", "1Gi", &json!({}));
        world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
        world.pods("another", 1, &json!({}), "1", "1Gi", &json!({}));
        let plan = world.plan();
        assert!(reason(&plan).contains(want), "{want}: {}", reason(&plan));
        assert_eq!(plan.unschedulable.iter().map(|u| u.pod).collect::<Vec<_>>(), [1], "{want}");
        assert_eq!(plan.new_nodes.iter().flat_map(|n| n.pods.clone()).collect::<Vec<_>>(), [0, 2], "{want}");
    }
}

#[test]
fn a_claim_without_a_class_has_the_default_class() {
    let mut world = World::new();
    let annotations = json!({"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}});
    class(
        &mut world,
        "gp3",
        &json!({"metadata": annotations, "provisioner": EBS, "volumeBindingMode": "WaitForFirstConsumer"}),
    );
    claim(&mut world, "data", &json!({"spec": {}}));
    world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
    assert!(world.plan().unschedulable.is_empty());
}

#[test]
fn the_claim_of_an_ephemeral_volume_is_named_after_the_pod() {
    let mut world = World::new();
    waiting_class(&mut world);
    let spec = json!({"volumes": [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]});
    world.pods("p", 1, &json!({}), "1", "1Gi", &spec);
    assert!(reason(&world.plan()).contains("default/p-0-scratch"));
    unbound(&mut world, "p-0-scratch");
    assert!(world.plan().unschedulable.is_empty());
}

#[test]
fn a_local_volume_keeps_its_pod_on_its_node() {
    let on = |host: &str| json!([{"key": HOST, "operator": "In", "values": [host]}]);
    let mut world = World::new();
    for name in ["m", "n", "o"] {
        world.node(name, "z-a", 8, &[]);
    }
    bound(&mut world, "data", &on("n"));
    world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
    assert_eq!(world.plan().placements[0].node, 1);
    world.at(1).schedulable = false;
    assert!(world.plan().new_nodes.is_empty(), "a new node can't attach it");
    assert!(reason(&world.plan()).contains("kubernetes.io/hostname In [n]"), "{}", reason(&world.plan()));
}

#[test]
fn volumes_of_one_pod_must_be_reachable_from_one_node() {
    for (second, want) in [("z-b", None), ("z-a", Some("z-a"))] {
        let mut world = World::new();
        bound(&mut world, "one", &in_zone("z-a"));
        bound(&mut world, "two", &in_zone(second));
        world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["one", "two"]));
        let plan = world.plan();
        match want {
            Some(zone) => assert!(zones(&plan).contains_key(zone)),
            None => assert!(reason(&plan).contains("no node can have all its volumes"), "{}", reason(&plan)),
        }
    }
}

#[test]
fn spread_counts_domains_that_volumes_exclude() {
    // As in kube-scheduler, only the pod's own affinity excludes domains.
    let labels = json!({"app": "db"});
    let mut world = World::new();
    for pod in 0..3 {
        let name = format!("data-{pod}");
        bound(&mut world, &name, &in_zone("z-a"));
        let mut spec = spread(ZONE, &labels, &json!({}));
        spec["volumes"] = claims(&[&name])["volumes"].clone();
        world.pods(&format!("db{pod}"), 1, &labels, "1", "1Gi", &spec);
    }
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.unschedulable.len()), (1, 2));
    assert!(reason(&plan).contains("topology spread"), "{}", reason(&plan));
}

#[test]
fn pods_whose_volumes_have_equal_requirements_share_nodes() {
    let mut world = World::new();
    waiting_class(&mut world);
    for pod in 0..4 {
        unbound(&mut world, &format!("data-{pod}"));
        world.pods(&format!("db{pod}"), 1, &json!({}), "500m", "1Gi", &claims(&[&format!("data-{pod}")]));
    }
    assert_eq!(types(&world.plan()).len(), 1);
}

#[test]
fn a_csi_node_has_the_limit_of_each_driver() {
    let csi_node = json!({"spec": {"drivers": [
        {"name": EBS, "nodeID": "i", "allocatable": {"count": 26}}, {"name": "efs.csi.aws.com", "nodeID": "i"}]}});
    let limits = attach_limits(&serde_json::from_value(csi_node).unwrap());
    assert_eq!(limits[EBS], 26);
    assert!(limits["efs.csi.aws.com"] > 1_000);
}

/// A `ReadWriteOncePod` claim.
fn single(world: &mut World, name: &str) {
    claim(world, name, &json!({"spec": {"storageClassName": "gp3", "accessModes": ["ReadWriteOncePod"]}}));
}

#[test]
fn a_pod_waits_for_a_read_write_once_pod_claim_in_use() {
    let mut world = World::new();
    waiting_class(&mut world);
    single(&mut world, "data");
    let running = json!({"app": "running"});
    world.node("n", "z-a", 2, &[(&running, &claims(&["data"]))]);
    world.pods("p", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
    let plan = world.plan();
    assert_eq!((plan.new_nodes.len(), plan.placements.len()), (0, 0));
    let want = "its PersistentVolumeClaim default/data is ReadWriteOncePod and in use by pod default/n-running-0";
    assert_eq!(reason(&plan), want);
    world.at(0).pods = std::iter::empty().collect();
    assert!(world.plan().unschedulable.is_empty(), "the pod that used it is removed");
    claim(&mut world, "data", &json!({"spec": {"storageClassName": "gp3", "accessModes": ["ReadWriteOnce"]}}));
    world.node("m", "z-a", 2, &[(&running, &claims(&["data"]))]);
    assert!(world.plan().unschedulable.is_empty(), "any number of pods of one node");
}

#[test]
fn of_pods_that_share_a_read_write_once_pod_claim_one_is_planned() {
    let mut world = World::new();
    waiting_class(&mut world);
    for name in ["data", "other"] {
        single(&mut world, name);
    }
    // First by priority; a pod that waits for another claim of its own blocks no other pod.
    world.pods("missing", 1, &json!({}), "1", "1Gi", &claims(&["data", "gone"]));
    world.pods("late", 1, &json!({}), "1", "1Gi", &claims(&["data"]));
    let mut first = claims(&["data", "other"]);
    first["priority"] = json!(5);
    world.pods("z-first", 1, &json!({}), "1", "1Gi", &first);
    let plan = world.plan();
    assert_eq!(plan.new_nodes.iter().flat_map(|node| node.pods.clone()).collect::<Vec<_>>(), [2]);
    let late = plan.unschedulable.iter().find(|left_out| left_out.pod == 1).unwrap();
    assert_eq!(
        late.reason,
        "its PersistentVolumeClaim default/data is ReadWriteOncePod, and pod default/z-first-0 comes first"
    );
}
