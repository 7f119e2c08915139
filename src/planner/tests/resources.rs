//! Behaviors 11 to 18: requests of pods and resources of nodes.

use std::sync::Arc;

use serde_json::{Value, json};
use stowage_model::units::MicroUsd;

use crate::test_support::{World, ZONE, is_bound, lone, reason, types};

#[test]
fn b14_a_gpu_pod_gets_a_gpu_type_or_a_reason_that_names_the_gpu() {
    let gpu = json!({"requests": {"nvidia.com/gpu": "1"}});
    assert_eq!(types(&lone(&gpu).plan()), ["g1.x4"]);
    let plan = lone(&json!({"requests": {"nvidia.com/gpu": "1"}, "nodeSelector": {ZONE: "z-c"}})).plan();
    let text = reason(&plan);
    assert!(
        text.contains("needs 1 nvidia.com/gpu") && text.contains("NodePool default") && text.contains("z-c"),
        "{text}"
    );
}

#[test]
fn b15_pod_slots_limit_a_node_before_cpu() {
    let mut world = World::new();
    world.pods("p", 32, &json!({}), "1m", "1Mi", &json!({}));
    let plan = world.plan();
    let slots: i64 = plan.new_nodes.iter().map(|n| n.choices[0].instance_type.allocatable.pods).sum();
    assert_eq!(slots, 32, "{:?}", types(&plan));
}

#[test]
fn b16_pods_without_requests_still_count() {
    let mut world = World::new();
    world.pods("p", 17, &json!({}), "0", "0", &json!({}));
    let plan = world.plan();
    assert!(
        plan.unschedulable.is_empty()
            && plan.new_nodes.iter().all(|n| n.pods.len() <= 16 || types(&plan)[0] != "a1.x2")
    );
}

#[test]
fn b17_daemon_overhead_reduces_room_only_where_the_daemon_runs() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "2", "1Gi", &json!({}));
    assert_eq!(types(&world.plan()), ["a1.x2"]);
    world.daemon("500m", &json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}}));
    let plan = world.plan();
    assert_eq!(types(&plan), ["c1.x2"], "the daemon runs on Arm only");
    world.daemon("500m", &json!({}));
    let plan = world.plan();
    assert_eq!(types(&plan), ["a1.x4"]);
    assert_eq!(plan.new_nodes[0].requests.cpu.0, 2500, "pods, and the daemons of whichever type is launched");
}

#[test]
fn a_daemon_is_not_expected_on_a_type_that_lacks_its_device() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "2", "1Gi", &json!({}));
    world.daemon("500m", &json!({"requests": {"nvidia.com/gpu": "1"}}));
    let plan = world.plan();
    assert_eq!(types(&plan), ["a1.x2"]);
    assert_eq!((plan.new_nodes[0].requests.cpu.0, plan.new_nodes[0].requests.extended.len()), (2000, 0));
}

#[test]
fn a_daemon_with_a_device_plugin_resource_is_overhead() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "2", "1Gi", &json!({}));
    world.daemon("500m", &json!({"requests": {"smarter-devices/fuse": "1"}}));
    let plan = world.plan();
    assert_eq!(plan.new_nodes[0].requests.cpu.0, 2500);
    // The plan does not wait for the resource: the type may never have it.
    assert!(plan.new_nodes[0].requests.extended.is_empty());
}

#[test]
fn no_node_too_small_for_its_daemons_is_purchased() {
    let mut world = World::new();
    world.pods("best-effort", 1, &json!({}), "0", "0", &json!({}));
    world.daemon("3", &json!({}));
    let plan = world.plan();
    assert!(plan.unschedulable.is_empty());
    assert_eq!(types(&plan), ["a1.x4"]);
}

#[test]
fn a_daemon_that_no_type_holds_stays_pending_and_takes_nothing() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "2", "1Gi", &json!({}));
    world.daemon("500m", &json!({}));
    let before = world.plan();
    world.daemon("5000", &json!({}));
    for _ in 0..4 {
        // Requests whose sum exceeds 64 bits.
        world.daemon("0", &json!({"requests": {"memory": "4611686018416650649"}}));
    }
    let plan = world.plan();
    assert_eq!(types(&plan), types(&before));
    assert_eq!(plan.new_nodes[0].requests, before.new_nodes[0].requests, "only the daemon that runs is reserved for");
}

#[test]
fn daemons_that_no_type_holds_together_count_by_priority_and_then_size() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "100m", "64Mi", &json!({}));
    let largest = world.problem.pools[0].catalog.instance_types.iter().map(|t| t.allocatable.cpu.0).max().unwrap();
    let half = format!("{}m", largest * 3 / 5);
    world.daemon(&half, &json!({}));
    world.daemon(&half, &json!({"priority": 1000}));
    world.daemon("50m", &json!({}));
    let plan = crate::plan(&world.problem, &world.column_cache);
    assert!(plan.unschedulable.is_empty(), "{:?}", plan.unschedulable);
    assert_eq!(
        plan.new_nodes[0].requests.cpu.0,
        largest * 3 / 5 + 50 + 100,
        "one of the two large daemons, and the small one"
    );
}

#[test]
fn b18_two_pods_on_one_host_port_never_share_a_node() {
    let mut world = World::new();
    let port = |ip: &str| json!({"ports": [{"containerPort": 80, "hostPort": 80, "hostIP": ip}]});
    world.pods("any", 2, &json!({}), "100m", "64Mi", &port(""));
    world.pods("one", 1, &json!({}), "100m", "64Mi", &port("10.0.0.1"));
    world.pods("two", 1, &json!({}), "100m", "64Mi", &port("10.0.0.2"));
    assert_eq!(world.plan().new_nodes.len(), 3, "two wildcards alone, the two addresses together");
    world.daemon("0", &port(""));
    assert_eq!(world.plan().unschedulable.len(), 4, "a daemon uses the port on every node");
}

#[test]
fn the_reason_for_a_pod_larger_than_any_type_names_the_largest() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "500", "2Ti", &json!({}));
    let text = reason(&world.plan()).to_owned();
    assert!(text.contains("no instance type holds cpu 500, memory 2Ti (largest: "), "{text}");
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({"requests": {"ephemeral-storage": "9Ti"}}));
    let text = reason(&world.plan()).to_owned();
    let (needed, largest) = text.split_once(" (largest: ").unwrap();
    assert!(needed.ends_with("ephemeral-storage 9Ti") && largest.contains(", ephemeral-storage "), "{text}");
}

#[test]
fn an_unplaceable_pod_does_not_affect_the_others() {
    for (what, cpu, extra) in [
        ("too large", "500", json!({})),
        ("a resource that no type has", "1", json!({"example.com/rare": "1"})),
        ("a GPU in a pool without", "1", json!({"nvidia.com/gpu": "1"})),
    ] {
        let no_gpu = json!({"requirements": [
            {"key": "karpenter.k8s.aws/instance-gpu-count", "operator": "DoesNotExist"}]});
        let mut world = World::with_pools(&[("default", no_gpu)]);
        world.pods("small", 5, &json!({}), "1", "1Gi", &json!({}));
        world.pods("odd", 2, &json!({}), cpu, "1Gi", &json!({"requests": extra}));
        world.pods("middle", 3, &json!({}), "2", "1Gi", &json!({}));
        let plan = world.plan();
        let left_out: Vec<usize> = plan.unschedulable.iter().map(|u| u.pod).collect();
        assert_eq!(left_out, [5, 6], "{what}: {:?}", plan.unschedulable);
        assert_eq!(plan.cost, MicroUsd(480_000), "{what}: 11 CPUs on nodes of an even number of CPUs");
        assert!(is_bound(&plan, 480_000), "{what}: {:?}", plan.lower_bound);
    }
}

/// The type that a pod of one container of 1 CPU and these init containers, overhead or pod-level resources gets.
fn type_for(spec: &Value) -> String {
    let plan = lone(spec).plan();
    assert!(plan.unschedulable.is_empty(), "{}", reason(&plan));
    types(&plan).remove(0)
}

fn init(cpu: &str, sidecar: bool) -> Value {
    let mut container = json!({"name": "i", "resources": {"requests": {"cpu": cpu}}});
    if sidecar {
        container["restartPolicy"] = json!("Always");
    }
    container
}

#[test]
fn b11_an_init_container_larger_than_the_sum_determines_the_request() {
    for (init_containers, want) in [
        (json!([init("1", false)]), "a1.x2"),
        (json!([init("3", false)]), "a1.x4"),
        (json!([init("2", false), init("2", false)]), "a1.x2"),
    ] {
        assert_eq!(type_for(&json!({"initContainers": init_containers})), want, "{init_containers}");
    }
}

#[test]
fn b12_a_sidecar_is_added() {
    for (init_containers, want) in [
        (json!([init("1", true)]), "a1.x2"),
        (json!([init("1500m", true)]), "a1.x4"),
        (json!([init("1", true), init("3", false)]), "a1.x4"),
        (json!([init("1", true), init("3500m", false)]), "a1.x8"),
        (json!([init("3500m", false), init("1", true)]), "a1.x4"),
    ] {
        assert_eq!(type_for(&json!({"initContainers": init_containers})), want, "{init_containers}");
    }
}

#[test]
fn b13_pod_overhead_is_added() {
    for (overhead, want) in
        [(json!({"cpu": "1"}), "a1.x2"), (json!({"cpu": "1100m"}), "a1.x4"), (json!({"memory": "7500Mi"}), "r1.x2")]
    {
        assert_eq!(type_for(&json!({"overhead": overhead})), want, "{overhead}");
    }
}

#[test]
fn pod_level_resources_override_the_sum_of_containers() {
    for (resources, want) in [
        (json!({"requests": {"cpu": "3"}}), "a1.x4"),
        (json!({"requests": {"cpu": "100m"}, "limits": {"cpu": "16"}}), "a1.x2"),
        // A limit replaces the request only where no container has a request.
        (json!({"limits": {"cpu": "16"}}), "a1.x2"),
    ] {
        assert_eq!(type_for(&json!({"resources": resources})), want, "{resources}");
    }
}

#[test]
fn ephemeral_storage_and_huge_pages_limit_like_any_resource() {
    let mut world = World::new();
    world.pods("p", 3, &json!({}), "100m", "64Mi", &json!({"requests": {"ephemeral-storage": "9Gi"}}));
    assert_eq!(world.plan().new_nodes.len(), 2, "20Gi per node");
    let plan = lone(&json!({"requests": {"hugepages-2Mi": "100Mi"}})).plan();
    assert!(reason(&plan).starts_with("needs 100Mi hugepages-2Mi; "), "{}", reason(&plan));
    assert!(reason(&plan).contains("allows no type with hugepages-2Mi"), "{}", reason(&plan));
    let mut world = World::new();
    world.node("n", "z-a", 4, &[]).allocatable.set("hugepages-2Mi", 150 << 20);
    world.pods("p", 2, &json!({}), "100m", "64Mi", &json!({"requests": {"hugepages-2Mi": "100Mi"}}));
    let plan = world.plan();
    assert_eq!((plan.placements[0].pods.len(), plan.unschedulable.len()), (1, 1));
}

#[test]
fn accelerators_of_every_vendor_are_selected_by_resource() {
    for resource in [
        "nvidia.com/gpu",
        "amd.com/gpu",
        "habana.ai/gaudi",
        "aws.amazon.com/neuron",
        "aws.amazon.com/neuroncore",
        "vpc.amazonaws.com/efa",
        "vpc.amazonaws.com/pod-eni",
    ] {
        let mut world = World::new();
        let mut catalog = (*world.problem.pools[0].catalog).clone();
        let mut special = (**catalog.instance_types.iter().find(|t| &*t.name == "m1.x8").unwrap()).clone();
        special.name = "special.x8".into();
        for amounts in [&mut special.capacity, &mut special.allocatable] {
            amounts.set(resource, 2);
        }
        catalog.instance_types.push(Arc::new(special));
        world.problem.pools[0].catalog = Arc::new(catalog);
        world.pods("p", 3, &json!({}), "1", "1Gi", &json!({"requests": {resource: "1"}}));
        let plan = world.plan();
        assert!(plan.unschedulable.is_empty(), "{resource}: {}", reason(&plan));
        assert!(plan.new_nodes.iter().all(|n| n.choices.iter().all(|c| c.instance_type.capacity.get(resource) > 0)));
    }
}

#[test]
fn pods_with_resource_claims_are_refused_and_their_daemons_reserve_nothing() {
    let claims = json!({"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]});
    let mut world = World::new();
    world.pods("claims", 1, &json!({}), "1", "1Gi", &claims);
    world.pods("plain", 1, &json!({}), "1900m", "1Gi", &json!({}));
    world.daemon("500m", &claims);
    let plan = world.plan();
    assert_eq!(plan.unschedulable.iter().map(|left| left.pod).collect::<Vec<_>>(), [0]);
    assert!(reason(&plan).starts_with("its resourceClaims"), "{}", reason(&plan));
    assert_eq!(types(&plan), ["a1.x2"], "the daemon takes no CPU");
}
