use serde_json::{Value, json};

use super::*;

fn pool(spec: &Value) -> NodePoolSpec {
    let mut base = json!({
        "template": {
            "metadata": { "labels": {} },
            "spec": {
                "requirements": [],
                "nodeClassRef": { "group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default" },
            },
        },
    });
    for (pointer, value) in spec.as_object().unwrap() {
        let (parent, member) = pointer.rsplit_once('/').unwrap();
        base.pointer_mut(parent).unwrap()[member] = value.clone();
    }
    serde_json::from_value(base).unwrap()
}

#[test]
fn a_typical_pool_is_valid() {
    let spec = pool(&json!({
        "/template/metadata/labels": { "team": "a", "karpenter.k8s.aws/instance-family": "m7g" },
        "/template/spec/taints": [{ "key": "a", "value": "b", "effect": "NoSchedule" }],
        "/template/spec/startupTaints": [{ "key": "a", "effect": "NoExecute" }],
        "/template/spec/expireAfter": "Never",
        "/template/spec/terminationGracePeriod": "1h30m",
        "/template/spec/requirements": [
            { "key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot", "on-demand"] },
            { "key": "karpenter.k8s.aws/instance-generation", "operator": "Gt", "values": ["2"] },
        ],
        "/limits": { "cpu": 1000, "memory": "1.5Ti", "nodes": "5" },
        "/weight": 10,
        "/disruption": { "budgets": [{ "nodes": "0", "schedule": "@daily", "duration": "8h" }] },
    }));
    assert_eq!(node_pool(&spec), []);
}

#[test]
fn each_validation_error_names_its_field() {
    for (pointer, value, expected) in [
        (
            "/template/metadata/labels",
            json!({ "karpenter.sh/nodepool": "x" }),
            "spec.template.metadata.labels[karpenter.sh/nodepool]: is restricted: it is set to the name of the NodePool",
        ),
        (
            "/template/metadata/labels",
            json!({ "kubernetes.io/hostname": "x" }),
            "spec.template.metadata.labels[kubernetes.io/hostname]: is restricted: it can't be set by a NodePool",
        ),
        (
            "/template/metadata/labels",
            json!({ "a b": "x" }),
            "spec.template.metadata.labels[a b]: 'a b' is not a label key",
        ),
        (
            "/template/metadata/labels",
            json!({ "team": "a b" }),
            "spec.template.metadata.labels[team]: 'a b' is not a label value: at most 63 letters, digits, '-', '_' and '.', \
             with a letter or digit at both ends",
        ),
        (
            "/template/spec/taints",
            json!([{ "key": "a", "effect": "Never" }]),
            "spec.template.spec.taints[0].effect: 'Never' is none of NoSchedule, PreferNoSchedule, NoExecute",
        ),
        (
            "/template/spec/startupTaints",
            json!([{ "key": "", "effect": "NoSchedule" }]),
            "spec.template.spec.startupTaints[0].key: '' is not a taint key",
        ),
        (
            "/template/spec/taints",
            json!([{ "key": "a", "value": "b c", "effect": "NoSchedule" }]),
            "spec.template.spec.taints[0].value: 'b c' is not a taint value",
        ),
        (
            "/template/spec/taints",
            json!([{ "key": "a", "effect": "NoSchedule" }, { "key": "a", "value": "b", "effect": "NoSchedule" }]),
            "spec.template.spec.taints[1]: a:NoSchedule is there more than once in taints and startupTaints",
        ),
        (
            "/template/spec/expireAfter",
            json!("30d"),
            "spec.template.spec.expireAfter: '30d' is not a duration: write hours, minutes and seconds, as 720h, 30s or 1h30m, \
             or Never",
        ),
        (
            "/template/spec/terminationGracePeriod",
            json!("Never"),
            "spec.template.spec.terminationGracePeriod: 'Never' is not a duration: write hours, minutes and seconds, as 720h, \
             30s or 1h30m",
        ),
        (
            "/template/spec/nodeClassRef",
            json!({ "group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "" }),
            "spec.template.spec.nodeClassRef.name: may not be empty",
        ),
        (
            "/disruption",
            json!({ "consolidateAfter": "soon" }),
            "spec.disruption.consolidateAfter: 'soon' is not a duration: write hours, minutes and seconds, as 720h, 30s or \
             1h30m, or Never",
        ),
        (
            "/disruption",
            json!({ "consolidationPolicy": "Always" }),
            "spec.disruption.consolidationPolicy: 'Always' is none of WhenEmpty, WhenEmptyOrUnderutilized, Balanced",
        ),
        (
            "/disruption",
            json!({ "budgets": [{ "nodes": "101%" }] }),
            "spec.disruption.budgets[0].nodes: '101%' is neither a count, as 5, nor a percentage up to 100%",
        ),
        (
            "/disruption",
            json!({ "budgets": [{ "nodes": "1", "duration": "8h" }] }),
            "spec.disruption.budgets[0]: 'schedule' and 'duration' must be set together",
        ),
        (
            "/disruption",
            json!({ "budgets": [{ "nodes": "1", "reasons": ["Empty", "Bored"] }] }),
            "spec.disruption.budgets[0].reasons[1]: 'Bored' is none of Underutilized, Empty, Drifted, Unhealthy",
        ),
        ("/weight", json!(101), "spec.weight: must be 1 to 100"),
        (
            "/limits",
            json!({ "cpu": "lots" }),
            "spec.limits.cpu: 'lots' is not an amount: write a number, as 100, 1500m or 64Gi",
        ),
        (
            "/limits",
            json!({ "cpu": "0", "memory": "-0", "nodes": "-1" }),
            "spec.limits.nodes: '-1' is negative: write 0 for no nodes, or remove the limit",
        ),
    ] {
        let found: Vec<String> = node_pool(&pool(&json!({ pointer: value }))).iter().map(ToString::to_string).collect();
        assert_eq!(found, [expected]);
    }
}

#[test]
fn a_static_pool_has_no_weight_and_only_a_limit_on_nodes() {
    let spec = pool(&json!({ "/replicas": 2, "/weight": 5, "/limits": { "cpu": "1", "nodes": "3" } }));
    let found: Vec<String> = node_pool(&spec).into_iter().map(|invalid| invalid.field).collect();
    assert_eq!(found, ["spec.weight", "spec.limits.cpu"]);
}
