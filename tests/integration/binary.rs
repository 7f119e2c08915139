//! Tests of the built binary: output, exit codes, messages.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::{Value, json};

fn stowage(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stowage")).args(args).env_remove("KUBECONFIG").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn pod(name: &str, cpu: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop"},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]}})
}

fn pool() -> Value {
    json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "default"}, "spec": {"template": {"spec": {
        "requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]}],
        "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}}}}})
}

fn scenario(folder: &Path, pods: &[Value]) -> String {
    let file = folder.join("scenario.json");
    std::fs::write(&file, json!({"nodePools": [pool()], "pods": pods}).to_string()).unwrap();
    file.display().to_string()
}

#[test]
fn a_scenario_that_fits_is_planned_with_every_promised_field() {
    let folder = tempfile::tempdir().unwrap();
    let file = scenario(folder.path(), &[pod("a", "1"), pod("b", "500m")]);
    let done = stowage(&["simulate", "--scenario", &file, "--output", "json"]);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let plan: Value = serde_json::from_slice(&done.stdout).unwrap();
    let mut placed = Vec::new();
    let mut cost = 0.0;
    for node in plan["nodes"].as_array().unwrap() {
        for field in ["nodePool", "instanceType", "zone", "capacityType"] {
            assert!(node[field].is_string(), "{field} of {node}");
        }
        assert_eq!(node["capacityType"], "on-demand", "no spot unless requested");
        cost += node["priceUsdPerHour"].as_f64().unwrap();
        placed.extend(node["pods"].as_array().unwrap().iter().map(|pod| pod.as_str().unwrap().to_owned()));
    }
    placed.sort();
    assert_eq!(placed, ["shop/a", "shop/b"]);
    assert!((plan["costUsdPerHour"].as_f64().unwrap() - cost).abs() < 1e-6);
    assert_eq!(plan["unschedulable"], json!([]));
    assert!(plan["solveSeconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_plan_explains_each_node_and_can_be_rendered_as_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let file = scenario(folder.path(), &[pod("<b>a</b>", "1"), pod("huge", "5000")]);
    let plan: Value =
        serde_json::from_slice(&stowage(&["simulate", "--scenario", &file, "--output", "json"]).stdout).unwrap();
    let node = &plan["nodes"][0];
    let (price, next) = (node["priceUsdPerHour"].as_f64().unwrap(), &node["nextBest"]);
    assert!(next["priceUsdPerHour"].as_f64().unwrap() >= price, "{node}");
    assert_ne!(next["instanceType"], node["instanceType"]);
    assert!(node["alternatives"].as_u64().unwrap() > 1);
    assert!((1.0..=100.0).contains(&node["cpuPercent"].as_f64().unwrap()));
    let table = stowage(&["simulate", "--scenario", &file]);
    assert!(text(&table.stdout).contains(next["instanceType"].as_str().unwrap()), "{}", text(&table.stdout));

    let page = stowage(&["simulate", "--scenario", &file, "--output", "html"]);
    assert_eq!(page.status.code(), Some(3));
    let page = text(&page.stdout);
    for part in ["1 of 2", node["instanceType"].as_str().unwrap(), "shop/huge", "no instance type holds", "<svg"] {
        assert!(page.contains(part), "{part} is not in the page");
    }
    assert!(!page.contains("<b>a</b>") && !page.contains("<script") && !page.contains("src="), "{page}");
}

#[test]
fn unschedulable_pods_are_listed_with_a_reason_and_exit_code_3() {
    let folder = tempfile::tempdir().unwrap();
    let file = scenario(folder.path(), &[pod("huge", "5000"), pod("fine", "1")]);
    let done = stowage(&["simulate", "--scenario", &file, "--output", "json"]);
    assert_eq!(done.status.code(), Some(3));
    let plan: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(plan["unschedulable"][0]["pod"], "shop/huge");
    assert!(plan["unschedulable"][0]["reason"].as_str().unwrap().contains("no instance type holds cpu 5000"));
    assert_eq!(plan["nodes"][0]["pods"], json!(["shop/fine"]), "the other pod is placed");
}

#[test]
fn bad_input_exits_2_and_names_the_file_the_object_and_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let wrong_shape = json!({"metadata": {"name": "odd", "namespace": "shop"}, "spec": {"containers": "none"}});
    for (bad, wanted) in [
        (pod("odd", "lots"), ["scenario.json", "shop/odd", "lots"]),
        (wrong_shape, ["scenario.json", "odd", "spec.containers"]),
    ] {
        let file = scenario(folder.path(), &[pod("fine", "1"), bad]);
        let done = stowage(&["simulate", "--scenario", &file]);
        assert_eq!(done.status.code(), Some(2));
        for part in wanted {
            assert!(text(&done.stderr).contains(part), "{part} is not in: {}", text(&done.stderr));
        }
    }
    let done = stowage(&["simulate", "--scenario", "/no/such/file.json"]);
    assert_eq!(done.status.code(), Some(2));
    assert!(text(&done.stderr).contains("/no/such/file.json"));
}

#[test]
fn workloads_are_expanded_to_pods_and_skipped_kinds_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let template = json!({"metadata": {"labels": {"app": "x"}}, "spec": {"restartPolicy": "Never", "containers": [
        {"name": "c", "image": "i", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]}});
    let workload = |api: &str, kind: &str, name: &str, spec: Value| {
        let mut object =
            json!({"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": "shop"}, "spec": spec});
        if kind != "CronJob" {
            object["spec"]["template"] = template.clone();
        }
        object
    };
    let selector = json!({"matchLabels": {"app": "x"}});
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        pool(),
        workload("apps/v1", "Deployment", "web", json!({"replicas": 3, "selector": selector})),
        workload("apps/v1", "StatefulSet", "store", json!({"replicas": 2, "selector": selector, "serviceName": "s"})),
        workload("apps/v1", "ReplicaSet", "set", json!({"selector": selector})),
        workload("batch/v1", "Job", "job", json!({"parallelism": 2, "completions": 4})),
        workload("batch/v1", "CronJob", "cron", json!({"schedule": "@daily", "jobTemplate": {"spec": {"template": template.clone()}}})),
        workload("apps/v1", "DaemonSet", "agent", json!({"selector": selector})),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}},
    ]});
    std::fs::write(folder.path().join("all.json"), objects.to_string()).unwrap();
    let done = stowage(&["simulate", "-f", &folder.path().display().to_string(), "--output", "json"]);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert!(text(&done.stderr).contains("ConfigMap"), "{}", text(&done.stderr));
    let plan: Value = serde_json::from_slice(&done.stdout).unwrap();
    let nodes = plan["nodes"].as_array().unwrap();
    let mut count = std::collections::BTreeMap::new();
    for pod in nodes.iter().flat_map(|node| node["pods"].as_array().unwrap()) {
        let name = pod.as_str().unwrap().strip_prefix("shop/").unwrap();
        *count.entry(name.rsplit_once('-').unwrap().0.to_owned()).or_insert(0) += 1;
    }
    let wanted = [("cron", 1), ("job", 2), ("set", 1), ("store", 2), ("web", 3)];
    assert_eq!(count.iter().map(|(name, n)| (name.as_str(), *n)).collect::<Vec<_>>(), wanted);
}

#[test]
fn gated_and_deleting_pods_are_skipped_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let pod = |name: &str, metadata: Value, spec: Value| {
        let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [
            {"name": "c", "image": "i", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]}});
        for (field, extra) in [("metadata", metadata), ("spec", spec)] {
            pod[field].as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        }
        pod
    };
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        pool(),
        pod("waits", json!({}), json!({})),
        pod("gated", json!({}), json!({"schedulingGates": [{"name": "g"}]})),
        pod("ending", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}), json!({})),
    ]});
    std::fs::write(folder.path().join("all.json"), objects.to_string()).unwrap();
    let done = stowage(&["simulate", "-f", &folder.path().display().to_string(), "--output", "json"]);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert!(text(&done.stderr).contains("skipped 2 Pod, gated or being deleted"), "{}", text(&done.stderr));
    let plan: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(plan["nodes"].as_array().unwrap().len(), 1);
    assert_eq!(plan["nodes"][0]["pods"], json!(["default/waits"]));
}

#[test]
fn manifests_of_volumes_bind_pods_to_their_zones() {
    let claim = |class: &str| json!({"accessModes": ["ReadWriteOnce"], "storageClassName": class, "resources": {"requests": {"storage": "1Gi"}}});
    let set = |class: &str| {
        json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "db", "namespace": "shop"}, "spec": {
            "replicas": 2, "serviceName": "db", "selector": {"matchLabels": {"app": "db"}},
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim(class)}],
            "template": {"metadata": {"labels": {"app": "db"}}, "spec": {
                "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
                "volumes": [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": claim(class)}}}]}}}})
    };
    let class = json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "zonal"},
        "provisioner": "ebs.csi.aws.com", "volumeBindingMode": "WaitForFirstConsumer", "allowedTopologies": [
            {"matchLabelExpressions": [{"key": "topology.ebs.csi.aws.com/zone", "values": ["us-east-1c"]}]}]});
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv"}, "spec": {
        "csi": {"driver": "ebs.csi.aws.com", "volumeHandle": "v"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "topology.ebs.csi.aws.com/zone", "operator": "In", "values": ["us-east-1d"]}]}]}}}});
    let mut bound = claim("zonal");
    bound["volumeName"] = json!("pv");
    let first = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data-db-0", "namespace": "shop"}, "spec": bound});
    let mut lost = pod("lost", "1");
    lost["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "gone"}}]);
    for (class_name, objects, zones, code) in [
        ("zonal", vec![class.clone()], vec!["us-east-1c"], 0),
        ("unknown", vec![], vec!["us-east-1a"], 0),
        ("zonal", vec![lost], vec!["us-east-1a"], 3),
        ("zonal", vec![class, volume, first], vec![], 3),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let objects: Vec<Value> = [pool(), set(class_name)].into_iter().chain(objects).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        std::fs::write(folder.path().join("all.json"), list.to_string()).unwrap();
        let done = stowage(&["simulate", "-f", &folder.path().display().to_string(), "--output", "json"]);
        assert_eq!(done.status.code(), Some(code), "{}", text(&done.stderr));
        let plan: Value = serde_json::from_slice(&done.stdout).unwrap();
        if !zones.is_empty() {
            let mut found: Vec<&str> =
                plan["nodes"].as_array().unwrap().iter().map(|node| node["zone"].as_str().unwrap()).collect();
            found.dedup();
            assert_eq!(found, zones, "{class_name}");
        }
        let reasons: Vec<&str> =
            plan["unschedulable"].as_array().unwrap().iter().map(|u| u["reason"].as_str().unwrap()).collect();
        match (code, zones.is_empty()) {
            (0, _) => assert!(reasons.is_empty()),
            // Its scratch volume must be provisioned in c, its data volume is in d.
            (_, true) => {
                assert!(reasons.len() == 1 && reasons[0].contains("no node can have all its volumes"), "{reasons:?}");
            }
            (_, false) => assert_eq!(reasons, ["PersistentVolumeClaim shop/gone does not exist"]),
        }
        if class_name == "unknown" {
            assert!(text(&done.stderr).contains("assumed StorageClass unknown"), "{}", text(&done.stderr));
        }
    }
}

#[test]
fn the_service_without_a_cluster_names_the_missing_setting() {
    let done = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(["controller"])
        .env("KUBECONFIG", "/no/such/kubeconfig")
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(2));
    assert!(text(&done.stderr).contains("set KUBECONFIG"), "{}", text(&done.stderr));
    let done =
        Command::new(env!("CARGO_BIN_EXE_stowage")).args(["controller"]).env("METRICS_PORT", "many").output().unwrap();
    assert_eq!(done.status.code(), Some(2));
    for part in ["METRICS_PORT", "many"] {
        assert!(
            text(&done.stderr).contains(part) || text(&done.stderr).contains("--metrics-port"),
            "{}",
            text(&done.stderr)
        );
    }
}

#[test]
fn the_log_is_written_as_json_lines_to_the_chosen_outputs() {
    let run = |paths: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        command.arg("controller").env("KUBECONFIG", "/no/such/kubeconfig").env_remove("LOG_OUTPUT_PATHS");
        command.envs(paths.map(|paths| ("LOG_OUTPUT_PATHS", paths))).output().unwrap()
    };
    for (paths, outputs) in [
        (None, [false, true]),
        (Some("stderr"), [false, true]),
        (Some("stdout"), [true, false]),
        (Some("stdout,stderr"), [true; 2]),
    ] {
        let done = run(paths);
        assert_eq!(done.status.code(), Some(2));
        let last = [&done.stdout, &done.stderr].map(|output| text(output).lines().last().map(str::to_owned));
        for (line, is_written) in last.into_iter().zip(outputs) {
            assert_eq!(line.is_some(), is_written, "{paths:?}");
            let Some(line) = line else { continue };
            let line: Value = serde_json::from_str(&line).unwrap();
            assert_eq!((&line["level"], &line["message"]), (&json!("ERROR"), &json!("ended by an error")));
            assert!(line["error"].as_str().unwrap().contains("set KUBECONFIG"), "{line}");
        }
    }
    let refused = run(Some("stdout,/var/log/stowage.log"));
    assert_eq!(refused.status.code(), Some(2));
    for part in ["/var/log/stowage.log", "--log-output-paths", "stdout, stderr"] {
        assert!(text(&refused.stderr).contains(part), "{}", text(&refused.stderr));
    }
}

#[test]
fn a_limit_in_usd_counts_the_nodes_of_the_manifests() {
    let node = |name: &str, capacity_type: &str| {
        let labels = json!({"karpenter.sh/nodepool": "default", "node.kubernetes.io/instance-type": "m5.large",
            "topology.kubernetes.io/zone": "us-east-1a", "karpenter.sh/capacity-type": capacity_type});
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
            "spec": {"unschedulable": true}, "status": {"capacity": {"cpu": "2", "memory": "8Gi", "pods": "29"}}})
    };
    // On demand an m5.large costs 0.096 USD per hour; the node of an unknown price counts nothing.
    for (limit, code) in [("0.1", 3), ("10", 0)] {
        let mut limited = pool();
        limited["spec"]["limits"] = json!({"stowage.dev/usd-per-hour": limit});
        let objects = json!({"apiVersion": "v1", "kind": "List",
            "items": [limited, node("a", "on-demand"), node("b", "unknown"), pod("web", "1")]});
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("all.json"), objects.to_string()).unwrap();
        let done = stowage(&["simulate", "-f", &folder.path().display().to_string(), "--output", "json"]);
        assert_eq!(done.status.code(), Some(code), "{}", text(&done.stderr));
        let plan: Value = serde_json::from_slice(&done.stdout).unwrap();
        if code == 3 {
            let reason = plan["unschedulable"][0]["reason"].as_str().unwrap();
            let used =
                "limit on stowage.dev/usd-per-hour reached (stowage.dev/usd-per-hour 0.096 of 0.1 before this plan)";
            assert!(reason.contains(used), "{reason}");
        }
    }
}

/// The first lines of requests that a listener receives; each is answered with this status.
fn requests(listener: TcpListener, status: &'static str) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let mut lines = Vec::new();
            let mut line = String::new();
            while stream.read_line(&mut line).is_ok_and(|read| read > 2) {
                lines.push(std::mem::take(&mut line).trim_end().to_owned());
            }
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let _ = stream.get_mut().write_all(head.as_bytes());
            if sender.send(lines.first().cloned().unwrap_or_default()).is_err() {
                return;
            }
        }
    });
    receiver
}

#[test]
fn aws_is_called_through_the_proxy_of_the_environment_and_the_api_server_directly() {
    let listeners = [(), ()].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [proxy, server] = listeners.each_ref().map(|listener| format!("http://{}", listener.local_addr().unwrap()));
    let [to_proxy, to_server] = listeners;
    let (proxied, direct) = (requests(to_proxy, "502 Bad Gateway"), requests(to_server, "403 Forbidden"));
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    let access = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server}}], "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]});
    std::fs::write(&kubeconfig, access.to_string()).unwrap();
    let class = folder.path().join("class.yaml");
    let meta = json!({"name": "default"});
    let spec = json!({"role": "r", "amiSelectorTerms": [{"alias": "al2023@latest"}],
        "subnetSelectorTerms": [{"id": "subnet-1"}], "securityGroupSelectorTerms": [{"id": "sg-1"}]});
    let object = json!({"apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": meta, "spec": spec});
    std::fs::write(&class, object.to_string()).unwrap();
    let preflight = |files: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        command.args(["preflight", "--cluster-name", "c"]).args(files);
        command.env("KUBECONFIG", &kubeconfig).env("HTTPS_PROXY", &proxy).env("AWS_REGION", "us-east-1");
        command.env("AWS_ACCESS_KEY_ID", "id").env("AWS_SECRET_ACCESS_KEY", "secret");
        command.env_remove("NO_PROXY").env_remove("no_proxy").env_remove("AWS_ENDPOINT_URL");
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let limit = Duration::from_mins(1);
    let mut of_cluster = preflight(&[]);
    let listed = direct.recv_timeout(limit).expect("a call of the API server");
    assert!(listed.starts_with("GET /apis/karpenter.k8s.aws/v1/ec2nodeclasses"), "{listed}");
    of_cluster.wait().unwrap();
    let mut of_file = preflight(&["--file", &class.display().to_string()]);
    let tunnel = proxied.recv_timeout(limit).expect("a call of AWS");
    of_file.kill().unwrap();
    of_file.wait().unwrap();
    assert!(tunnel.starts_with("CONNECT ") && tunnel.contains(".us-east-1.amazonaws.com:443 "), "{tunnel}");
}

/// Text of the fenced blocks of a page that begin with `start`, without the fences and that line.
fn blocks(page: &str, start: &str) -> Vec<String> {
    let fenced = page.split("```").skip(1).step_by(2);
    fenced.filter_map(|block| block.strip_prefix(start)).map(str::to_owned).collect()
}

#[test]
fn the_worked_plan_in_the_planner_page_is_what_the_command_prints() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/planner.md")).unwrap();
    let (inputs, outputs) = (blocks(&page, "yaml\n"), blocks(&page, "console\n"));
    let [spread] = inputs.as_slice() else { panic!("one input: {inputs:?}") };
    let from = spread.find("      topologySpreadConstraints:").unwrap();
    let to = from + spread[from..].find("      containers:").unwrap();
    let without = format!("{}{}", &spread[..from], &spread[to..]);
    assert_eq!(outputs.len(), 2);
    let folder = tempfile::tempdir().unwrap();
    for (input, shown) in [spread, &without].into_iter().zip(&outputs) {
        let file = folder.path().join("twelve.yaml");
        std::fs::write(&file, input).unwrap();
        let printed = text(&stowage(&["simulate", "-f", &file.display().to_string()]).stdout);
        let shown = shown.trim_start_matches("$ stowage simulate -f twelve.yaml\n");
        let timeless = |output: &str| output.split(", planned in").next().unwrap().trim_end().to_owned();
        assert_eq!(timeless(&printed), timeless(shown));
    }
}
