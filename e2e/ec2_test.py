"""Launches on EC2's wire protocol (services.py has the participants): nodes match their NodePool and node class, and are terminated."""

import base64
import collections
import email
import itertools
import os
import re
import shlex
import subprocess
import time
import tomllib

import botocore.exceptions
import pytest

import aws
import faults
import harness
import kube
import kubelet
import observe
import services
import workloads
from kube import NODE_POOL, is_true, key
from services import CLAIM, CLUSTER, CLUSTER_NAME, FIGURES, NO_DRIFT, NODE_CLASS, node_class, one_per_node, record_figures, small_pool
from waiting import wait_until

UNREGISTERED = {"key": "karpenter.sh/unregistered", "effect": "NoExecute"}
TAGGED = ("karpenter.k8s.aws/tagged", "compatibility.karpenter.k8s.aws/cluster-name-tagged")
MANY = 200
SINGLES = 30  # plans of one node
READY_SECONDS = 30  # from the first object to ready NodePools, although moto answers some optional APIs with errors
PACE = 0.95  # seconds between two CreateTags calls, less the jitter of clocks and threads
TAGGING_SECONDS = 1.5 * MANY
UNREADABLE = ["OnDemandPricesUnreadable", "PlacementScoresUnreadable"]  # optional APIs that moto does not have
DNS = "10.96.0.53"


def launch_tags(pool):
    """The tags that the IAM policy requires on everything created for a pool, and the user's."""
    return {f"kubernetes.io/cluster/{CLUSTER}": "owned", NODE_POOL: pool, CLUSTER_NAME: CLUSTER, NODE_CLASS: "default", "team": "stowage"}


def assert_launch_tags(found, pool):
    """The tags include those of a launch for the pool."""
    assert launch_tags(pool).items() <= found.items()


def tagged(service, pool="default"):
    """The number of NodeClaims of a pool whose instance has been tagged, by their annotations."""
    annotations = [kube.annotations_of(claim) for claim in service.claims(pool)]
    return sum(all(given.get(name) == "true" for name in TAGGED) for given in annotations)


def assert_read_back(service, pool, capacity_type, kinds):
    """The launch templates of a pool match its node class, with tags for these kinds of resources (moto adds those of the template
    itself), and the user data of its instances are those of one of the templates."""
    profile = service.api.get("EC2NodeClass", "default")["status"]["instanceProfile"]
    roles = service.aws.iam.get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]["Roles"]
    assert [role["RoleName"] for role in roles] == [service.account.role]
    images = {id: name for name, id in service.moto.image_ids.items()}
    written = set()
    templates = service.templates(NODE_POOL, pool)
    assert templates, "there is no launch template"
    for template in templates:
        data = service.template_data(template)
        assert_launch_tags(aws.tags_of(template), pool)
        by_kind = {entry["ResourceType"]: aws.tags_of(entry) for entry in data["TagSpecifications"]}
        assert by_kind.keys() - {"launch-template"} == kinds
        for kind in kinds:
            assert_launch_tags(by_kind[kind], pool)
        assert re.search(r"^amazon-eks-node-al2023-(x86_64|arm64)-", images[data["ImageId"]])
        assert data["IamInstanceProfile"]["Name"] == profile
        assert data["MetadataOptions"]["HttpTokens"] == "required"
        assert sorted(data["NetworkInterfaces"][0]["Groups"]) == sorted(service.account.security_groups)
        disk = data["BlockDeviceMappings"][0]
        assert (disk["DeviceName"], disk["Ebs"]["VolumeSize"], disk["Ebs"]["Encrypted"]) == ("/dev/xvda", 20, True)
        assert "InstanceType" not in data, "the fleet chooses the type"
        written.add((data["ImageId"], data["UserData"]))
    instances = service.instances()
    for claim in service.claims(pool):
        id, node = service.instance_of(claim), service.mirror.node_of(claim)
        instance, data = instances[id], service.user_data(id)
        assert (instance["ImageId"], data) in written
        arch = {"amd64": "x86_64", "arm64": "arm64"}[node["metadata"]["labels"][workloads.ARCH]]
        assert re.search(f"-{arch}-standard-", images[instance["ImageId"]])
        settings = kubelet.settings_of(data)
        assert (settings.labels[NODE_POOL], settings.labels[kube.CAPACITY_TYPE]) == (pool, capacity_type)
        assert UNREGISTERED in [{name: taint[name] for name in ("key", "effect")} for taint in settings.taints]
        assert settings.max_pods == service.planned_allocatable(node)["pods"]
        cluster = cluster_of(data)
        assert (cluster["name"], cluster["apiServerEndpoint"], cluster["cidr"]) == (CLUSTER, service.plane.state["api"], "10.96.0.0/16")
        assert service.is_cluster_ca(cluster["certificateAuthority"])


def cluster_of(data):
    """The cluster in user data of Amazon Linux 2023."""
    message = email.message_from_string(base64.b64decode(data).decode())
    parts = [part for part in message.walk() if part.get_content_type() == kubelet.NODE_CONFIG]
    return kubelet.parse_yaml(parts[-1].get_payload())["spec"]["cluster"]


def record_calls(service, at, took, fleets):
    """Records the calls of the launches since a time, and those that tag their instances: one call each, at a limited rate."""
    tagging = lambda call: call.action == "CreateTags" or (call.action == "DescribeInstances" and call.names_instances)
    calls = collections.Counter(call.action for call in service.proxy.seen(since=at) if not tagging(call))
    record_figures(launched={"instances": MANY, "seconds": round(took, 1), "fleets": fleets, "calls": faults.by_action(calls)})
    service.wait(lambda: tagged(service, "many") == MANY, TAGGING_SECONDS, "all instances tagged", lambda: tagged(service, "many"))
    calls = collections.Counter(call.action for call in service.proxy.seen(since=at) if tagging(call))
    record_figures(tagged={"instances": MANY, "seconds": round(time.time() - at, 1), "calls": calls})


def offering_series(service):
    """Names of the metrics of offerings that have series."""
    return {sample.split("{")[0] for sample in service.stowage.metrics() if sample.startswith("stowage_cloudprovider_instance_type_")}


class TestLaunches:
    """Nodes are launched, match their specification, and are terminated."""

    @staticmethod
    def environment(request):
        pools = [workloads.node_pool(capacity_types=["on-demand"]), small_pool("spot", "spot"), small_pool("many", "on-demand")]
        for pool in pools:
            # moto's spot price is near zero: without a budget nothing is consolidated onto the spot pool until the last tests.
            pool["spec"]["disruption"]["budgets"] = [{"nodes": "0"}]
        return services.ec2(request.getfixturevalue("service_plane"), pools, broken_price_list=True)

    def test_0_failing_optional_apis_do_not_delay_the_start(self, service):
        print(f"\nNodePools ready after {service.ready_seconds:.1f} s", flush=True)
        assert service.ready_seconds < READY_SECONDS

    def test_1_pods_run_on_nodes_that_are_instances(self, service):
        # Not on the spot pool, whose price in moto is near zero.
        web = workloads.workload("shop", "web", 30, 500, 1024, nodeSelector={NODE_POOL: "default"}, **workloads.zone_spread("web"))
        begin = time.monotonic()
        service.plane.apply(workloads.namespace("shop"), web)
        service.wait_bound("shop", 30, 90)
        instances = service.instances()
        print(f"\n30 pods on {len(instances)} instances after {time.monotonic() - begin:.1f} s: ", end="")
        print(", ".join(sorted(f"{item['InstanceType']}/{item['Placement']['AvailabilityZone']}" for item in instances.values())), flush=True)
        service.assert_nothing_leaked()
        zones = {node["metadata"]["labels"][workloads.ZONE] for node in service.mirror.nodes()}
        assert zones == set(aws.ZONES)
        assert len(offering_series(service)) == 4
        for claim in service.claims():
            labels, instance = claim["metadata"]["labels"], instances[service.instance_of(claim)]
            assert labels[kube.INSTANCE_TYPE] == instance["InstanceType"]
            assert labels[kube.ZONE] == instance["Placement"]["AvailabilityZone"]
            assert claim["status"]["imageID"] == instance["ImageId"]
            assert instance["SubnetId"] in service.account.subnets.values()
        service.assert_no_errors()

    def test_2_tags_are_those_that_the_iam_policy_requires(self, service):
        for instance in service.instances().values():
            assert_launch_tags(aws.tags_of(instance), "default")
        # moto does not tag volumes by a fleet's request.
        requested = [call.tags() for call in service.proxy.seen("CreateFleet") if call.form.get("DryRun") != "true"]
        assert requested
        for by_kind in requested:
            assert set(by_kind) == {"fleet", "instance", "volume"}
            for found in by_kind.values():
                assert_launch_tags(found, "default")
        # Tagged once the node is registered.
        names = {service.instance_of(claim): (claim["status"]["nodeName"], key(claim)) for claim in service.claims()}
        current = lambda: {id: (tags.get("Name"), tags.get(CLAIM)) for id, item in service.instances().items() for tags in [aws.tags_of(item)]}
        service.poll(lambda: current() == names, 60, "instances named after their nodes", current)
        service.wait(lambda: tagged(service) == len(names), 10, "NodeClaims annotated as tagged", lambda: f"{tagged(service)} of {len(names)}")
        times = [call.at for call in service.proxy.seen("CreateTags")]
        assert len(times) == len(names)
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert min(pauses) > PACE

    def test_3_templates_and_user_data_match_the_node_class(self, service):
        assert_read_back(service, "default", "on-demand", {"network-interface"})

    def test_4_nodes_have_the_planned_resources(self, service):
        for node in service.mirror.nodes():
            service.assert_allocatable_as_planned(node)

    def test_5_spot_pools_get_spot_instances(self, service):
        service.plane.apply(*one_per_node("spots", 3, "spot"))
        service.wait_bound("spots", 3, 60)
        claims, instances = service.claims("spot"), service.instances()
        assert len(claims) == 3
        for claim in claims:
            assert claim["metadata"]["labels"][kube.CAPACITY_TYPE] == "spot"
            assert instances[service.instance_of(claim)].get("InstanceLifecycle") == "spot"
            assert_launch_tags(aws.tags_of(instances[service.instance_of(claim)]), "spot")
        for claim in service.claims("default"):
            assert instances[service.instance_of(claim)].get("InstanceLifecycle") is None
        assert_read_back(service, "spot", "spot", {"network-interface", "spot-instances-request"})
        requests = service.aws.ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
        assert {request["InstanceId"] for request in requests} == {service.instance_of(claim) for claim in claims}
        for request in requests:
            assert_launch_tags(aws.tags_of(request), "spot")
        service.assert_nothing_leaked()
        service.assert_no_errors()

    def test_6_two_hundred_instances_launch_at_once(self, service):
        begin, at = time.monotonic(), time.time()
        service.plane.apply(*one_per_node("crowd", MANY, "many"))
        launched = lambda: sum(is_true(claim, "Launched") for claim in service.claims("many"))
        # A replica that loses its lease on a busy machine is restarted, and then waits 100 s for the instances of its own calls.
        service.wait(lambda: launched() == MANY, 300, f"{MANY} instances launched", service.mirror.summary)
        took = time.monotonic() - begin
        service.wait_bound("crowd", MANY, 180)
        print(f"\n{MANY} instances launched after {took:.1f} s, their pods bound after {time.monotonic() - begin:.1f} s", flush=True)
        fleets = service.fleets(at)
        if FIGURES:
            record_calls(service, at, took, len(fleets))
        print(f"{len(fleets)} fleets for {[call.count for call, _ in fleets]}, the last {max(delay for _, delay in fleets) * 1000:.0f} ms after its plan")
        print(faults.summary(service.proxy.counts(at), MANY), flush=True)
        # Two on a quiet machine; while NodeClaims are written slowly, a call does not wait for the last of them (29 were seen). A restarted
        # replica is refused the tokens that are in use.
        launching = [call for call, _ in fleets if call.status == 200]
        assert len(launching) <= MANY // 5, "equal launches share calls"
        assert len(service.claims("many")) == MANY
        service.assert_not_doubly_planned()
        service.assert_nothing_leaked()
        service.assert_no_errors()

    def test_6b_a_plan_becomes_a_call_quickly(self, service):
        service.plane.apply(*one_per_node("trickle", 1, "many"))
        service.wait_bound("trickle", 1, 60)
        at = time.time()
        for replicas in range(2, SINGLES + 2):
            service.api.scale("Deployment", "server", "trickle", replicas)
            service.wait(lambda: len(service.claims("many")) == MANY + replicas, 20, "a NodeClaim for the new pod")
        service.wait_bound("trickle", SINGLES + 1, 60)
        delays = sorted(delay * 1000 for _, delay in service.fleets(at))
        print(f"\nfrom plan to CreateFleet, {len(delays)} plans: p50 {observe.percentile(delays, 50):.0f} ms, p99 {observe.percentile(delays, 99):.0f} ms", flush=True)
        # On a busy machine a plan may precede the call of the plan before it: those are left out.
        steps = service.steps(at)
        assert len(steps) >= SINGLES // 2
        parts = {part: sorted(step[part] for step in steps) for part in steps[0]}
        shares = {part: {share: round(observe.percentile(values, share), 1) for share in (50, 99)} for part, values in parts.items()}
        print("; ".join(f"{part} {p[50]:.1f}, {p[99]:.1f}" for part, p in shares.items()), "(p50, p99 in ms)", flush=True)
        record_figures(plans=len(steps), milliseconds={part: {f"p{share}": value for share, value in p.items()} for part, p in shares.items()})
        assert len(delays) >= SINGLES
        assert observe.percentile(delays, 50) < 250
        service.assert_no_errors()

    def test_7_every_node_is_terminated_when_no_pod_is_left(self, service):
        begin = time.monotonic()
        for name in ("default", "spot", "many"):
            service.api.patch("NodePool", name, {"spec": {"disruption": {"budgets": [{"nodes": "100%"}, NO_DRIFT]}}})
        for space in ("shop", "spots", "crowd", "trickle"):
            service.api.scale_all(space, 0)
        service.wait(lambda: not service.mirror.claims() and not service.mirror.nodes(), 180, "every node deleted")
        wait_until(lambda: not service.instances(), 20, "every instance terminated", lambda: sorted(service.instances()), every=0.5)
        print(f"\nall nodes deleted after {time.monotonic() - begin:.1f} s", flush=True)
        service.assert_no_errors()

    def test_8_templates_follow_their_class_before_launches(self, service):
        at = time.time()
        # Those of dry runs have no NodePool.
        new = lambda: [call for call in service.proxy.seen("CreateLaunchTemplate", at) if {"team-2", "many"} <= set(call.form.values())]
        service.api.patch("EC2NodeClass", "default", {"spec": {"tags": {"team": "team-2"}}})
        service.wait(new, 60, "a launch template of the changed class")
        print(f"\nlaunch template created {time.time() - at:.1f} s after its class was changed", flush=True)
        assert service.fleets(at) == [], "the change launched instances"
        at = time.time()
        service.api.scale("Deployment", "server", "crowd", 1)
        service.wait_bound("crowd", 1, 60)
        assert new() == [], "the launch did not find its template"
        service.assert_no_errors()

    def test_9_each_failing_optional_api_is_reported_once(self, service):
        events = lambda: [event for event in service.plane.events("default") if event["reason"].endswith("Unreadable")]
        reasons = lambda: collections.Counter(event["reason"] for event in events() if event["regarding"]["kind"] == "EC2NodeClass")
        # The SDK retries each at first: the events were seen 70 and 100 s after the start.
        service.poll(lambda: len(reasons()) >= len(UNREADABLE), 120, "events of the failing APIs", reasons)
        assert sorted(reasons()) == UNREADABLE
        # A restarted process reports once more.
        assert max(reasons().values()) <= 1 + service.stowage.restarts
        assert [event for event in events() if event.get("series")] == [], "reported repeatedly"


# Settings of a user; those that the cluster or the plan determine are overridden.
TOML = """
[settings.kubernetes]
api-server = "https://elsewhere.example"
cluster-name = "another"
cluster-domain = "shop.internal"
max-pods = 7
made-up = "dropped"

[settings.kubernetes.node-labels]
own = "kept"
team = "another"

[settings.kubernetes.node-taints]
own = ["gone:NoSchedule"]

[settings.kubernetes.eviction-hard]
"nodefs.available" = "30%"

[settings.ntp]
time-servers = ["169.254.169.123"]
"""
SCRIPTS = {"al2": ("AL2", "#!/bin/bash\necho own"), "windows": ("Windows2022", "Write-Host own")}


class TestUserData:
    """The kubelet settings of a node class are the same in the plan, in the user data of each image family, and on the node."""

    @staticmethod
    def environment(request):
        default, bottlerocket = node_class(), node_class("bottlerocket")
        reserved = {"cpu": "60 + vcpus * 5", "memory": "11 * max_pods + 255", "ephemeral-storage": "vcpus / 0"}
        default["spec"]["kubelet"] = {"maxPods": "vcpus * 10", "kubeReserved": reserved, "systemReserved": {"memory": "memory_mib / 64"}}
        bottlerocket["spec"] |= {"amiSelectorTerms": [{"alias": "bottlerocket@latest"}], "userData": TOML}
        bottlerocket["spec"]["kubelet"] = {"clusterDNS": [DNS], "evictionHard": {"memory.available": "200Mi"}}
        made = [default, bottlerocket]
        for name, (family, script) in SCRIPTS.items():
            own = node_class(name)
            own["spec"] |= {"amiFamily": family, "userData": script, "amiSelectorTerms": [{"tags": {"karpenter.sh/discovery": CLUSTER}}]}
            made.append(own)
        pool = small_pool("toml", "on-demand", "bottlerocket")
        pool["spec"]["template"]["spec"]["taints"] = [{"key": "dedicated", "value": "toml", "effect": "NoSchedule"}]
        pools = [small_pool("sized", "on-demand"), pool]
        return services.ec2(request.getfixturevalue("service_plane"), pools, made, {
            "AWS_FEATURE_GATES": "NodeClassCEL=true", "STOWAGE_OFFERING_METRICS": "false", "STOWAGE_METRIC_NAMES": "karpenter", "DISABLE_CLUSTER_STATE_OBSERVABILITY": "true",
        })

    def test_1_nodes_have_the_values_of_their_expressions(self, service):
        service.plane.apply(*one_per_node("sized", 2, "sized"))
        service.wait_bound("sized", 2, 90)
        for id in service.instances():
            settings = kubelet.settings_of(service.user_data(id))
            # Of 2 vCPUs and 8 GiB; 475 MiB are rounded up to 480. A failing expression is left out, and reported.
            assert (settings.max_pods, settings.kube_reserved, settings.system_reserved) == (20, {"cpu": "70m", "memory": "480Mi"}, {"memory": "128Mi"})
        for node in service.mirror.nodes():
            assert node["status"]["allocatable"]["pods"] == "20"
            service.assert_allocatable_as_planned(node)
        assert "KubeletExpressionDropped" in [event["reason"] for event in service.plane.events("default")]
        service.assert_no_errors()

    def test_1b_offerings_and_nodes_have_no_series_when_they_are_disabled_and_names_are_chosen(self, service):
        names = {sample.split("{")[0] for sample in service.stowage.metrics()}
        assert not {name for name in names if "cloudprovider_instance_type_" in name or name.startswith("karpenter_nodes_allocatable")}
        assert {"karpenter_cloudprovider_duration_seconds_count", "karpenter_nodes_created_total", "stowage_ready"} <= names
        assert not {"stowage_cloudprovider_duration_seconds_count", "stowage_nodes_created_total"} & names

    def test_2_bottlerocket_settings_are_those_of_the_user_with_overrides(self, service):
        tolerations = [{"key": "dedicated", "operator": "Exists"}]
        server = workloads.workload("toml", "server", 1, 1200, 512, nodeSelector={"team": "toml"}, tolerations=tolerations)
        service.plane.apply(workloads.namespace("toml"), server)
        service.wait_bound("toml", 1, 90)
        (claim,), (template,) = service.claims("toml"), service.templates(NODE_POOL, "toml")
        data, node = service.template_data(template), service.mirror.node_of(claim)
        images = {id: name for name, id in service.moto.image_ids.items()}
        assert re.search(r"^bottlerocket-aws-k8s-.*-x86_64-", images[data["ImageId"]])
        assert [disk["DeviceName"] for disk in data["BlockDeviceMappings"]] == ["/dev/xvda", "/dev/xvdb"]
        assert service.user_data(service.instance_of(claim)) == data["UserData"]
        settings = tomllib.loads(base64.b64decode(data["UserData"]).decode())["settings"]
        kubernetes = settings.pop("kubernetes")
        assert settings == {"ntp": {"time-servers": ["169.254.169.123"]}}
        assert service.is_cluster_ca(kubernetes.pop("cluster-certificate"))
        labels = {"own": "kept", "team": "toml", NODE_POOL: "toml", NODE_CLASS: "bottlerocket", kube.CAPACITY_TYPE: "on-demand"}
        assert labels.items() <= kubernetes.pop("node-labels").items()
        expected = {
            "api-server": service.plane.state["api"],
            "cluster-name": CLUSTER,
            "cluster-dns-ip": DNS,
            "cluster-domain": "shop.internal",
            "max-pods": service.planned_allocatable(node)["pods"],
            "eviction-hard": {"memory.available": "200Mi"},
            "node-taints": {"dedicated": ["toml:NoSchedule"], UNREGISTERED["key"]: [":NoExecute"]},
        }
        assert kubernetes == expected
        assert labels.items() <= node["metadata"]["labels"].items()
        service.assert_allocatable_as_planned(node)
        service.assert_no_errors()

    def test_3_the_boot_scripts_of_other_families_call_the_bootstrap_script_of_eks(self, service):
        # Their templates are those of validation; nothing is launched.
        for name in SCRIPTS:
            service.wait_class(name)
        (linux,), (windows,) = (service.templates(NODE_CLASS, name) for name in SCRIPTS)
        linux, windows = (service.template_data(template)["UserData"] for template in (linux, windows))
        for data in (linux, windows):
            settings = kubelet.settings_of(data)
            assert settings.labels[kube.CAPACITY_TYPE] == "on-demand"
            assert UNREGISTERED["key"] in [taint["key"] for taint in settings.taints]
        parts = email.message_from_string(base64.b64decode(linux).decode()).get_payload()
        assert parts[0].get_payload().strip() == SCRIPTS["al2"][1]
        (call,) = re.findall(r"^/etc/eks/bootstrap\.sh .*", parts[1].get_payload().replace("\\\n", " "), re.M)
        words = shlex.split(call)
        assert words[1:5] == [CLUSTER, "--apiserver-endpoint", service.plane.state["api"], "--b64-cluster-ca"]
        assert service.is_cluster_ca(words[5])
        text = base64.b64decode(windows).decode()
        assert text.index(SCRIPTS["windows"][1]) < text.index("-EKSClusterName")
        found = re.search(r" -EKSClusterName '(.*?)' -APIServerEndpoint '(.*?)' -Base64ClusterCA '(.*?)' ", text)
        assert (found[1], found[2]) == (CLUSTER, service.plane.state["api"])
        assert service.is_cluster_ca(found[3])

    def test_4_deletion_of_a_class_waits_for_its_claims_and_deletes_its_aws_objects(self, service):
        find = lambda: service.api.find("EC2NodeClass", "bottlerocket")
        profiles = {name: service.api.get("EC2NodeClass", name)["status"]["instanceProfile"] for name in ("bottlerocket", "default")}
        (claim,) = service.claims("toml")
        service.api.delete("EC2NodeClass", "bottlerocket")
        waiting = lambda: service.plane.events("bottlerocket", "WaitingOnNodeClaimTermination")
        wait_until(waiting, 20, "an event that names the NodeClaims", lambda: service.plane.events("bottlerocket"))
        assert key(claim) in waiting()[0]["note"]
        assert find() and service.templates(NODE_POOL, "toml")
        service.aws.iam.get_instance_profile(InstanceProfileName=profiles["bottlerocket"])
        service.api.scale("Deployment", "server", "toml", 0)
        service.api.delete("NodeClaim", key(claim))
        begin = time.monotonic()
        service.poll(lambda: not find(), 60, "the class deleted", find)
        print(f"\nclass deleted {time.monotonic() - begin:.1f} s after its last NodeClaim was deleted", flush=True)
        assert service.claims("toml") == [], "it did not wait"
        assert service.templates(NODE_CLASS, "bottlerocket") == []
        with pytest.raises(botocore.exceptions.ClientError) as refused:
            service.aws.iam.get_instance_profile(InstanceProfileName=profiles["bottlerocket"])
        assert aws.code(refused.value) == "NoSuchEntity"
        assert service.templates(NODE_CLASS, "default"), "the templates of another class were deleted, too"
        service.aws.iam.get_instance_profile(InstanceProfileName=profiles["default"])
        service.assert_nothing_leaked()
        service.assert_no_errors()

    def test_5_a_class_whose_max_pods_fails_is_not_ready(self, service):
        broken = node_class()
        broken["spec"]["kubelet"] = {"maxPods": "vcpus *"}
        service.plane.apply(broken)

        def condition():
            status = (service.api.find("EC2NodeClass", "default") or {}).get("status", {})
            return next((item for item in status.get("conditions", []) if item["type"] == "ValidationSucceeded"), {})

        service.poll(lambda: condition().get("reason") == "KubeletExpressionInvalid", 60, "the class rejected", condition)
        assert "spec.kubelet.maxPods" in condition()["message"]


class TestLiveTests:
    """Rust's tests of single calls, which need an endpoint of independent origin."""

    def test_the_calls_are_understood(self, moto):
        # All packages: with one alone, cargo selects fewer features of the dependencies and compiles them again.
        command = ["cargo", "test", "--locked", "--quiet", "--lib", "ec2::live_tests", "--", "--ignored"]
        done = subprocess.run(command, cwd=harness.ROOT, env={**os.environ, **moto.env()}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"test result: ok\. [1-9]\d* passed", done.stdout)
