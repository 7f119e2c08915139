#!/usr/bin/env python3
"""Launches on EC2's wire protocol (ec2_service.py says what takes part): nodes come, are what NodePool and node class say, and go."""

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
import unittest

import aws
import faults
import harness
import kubelet
import observe
import workloads
from ec2_service import CLAIM, CLUSTER, CLUSTER_NAME, FIGURES, NODE_CLASS, POOL, UNDRIFTED, Service, node_class, note, one_a_node, small
from observe import holds, key

UNREGISTERED = {"key": "karpenter.sh/unregistered", "effect": "NoExecute"}
TAGGED = ("karpenter.k8s.aws/tagged", "compatibility.karpenter.k8s.aws/cluster-name-tagged")
MANY = 200
SINGLES = 30  # plans of one node
READY_SECONDS = 30  # from the first object to NodePools that are ready, though moto answers some of the optional APIs with errors
PACE = 0.95  # seconds from one call of CreateTags to the next, less what clocks and threads differ by
TAGGING_SECONDS = 1.5 * MANY
UNREADABLE = ["OnDemandPricesUnreadable", "PlacementScoresUnreadable"]  # what moto refuses to tell
DNS = "10.96.0.53"


def launch_tags(pool):
    """Tags that the IAM policy demands of all that is made for a pool, and the user's."""
    return {f"kubernetes.io/cluster/{CLUSTER}": "owned", POOL: pool, CLUSTER_NAME: CLUSTER, NODE_CLASS: "default", "team": "stowage"}


class Launches(Service):
    """Nodes come, are what they should be, and go."""

    @classmethod
    def pools(cls):
        pools = [workloads.node_pool(capacity_types=["on-demand"]), small("spot", "spot"), small("many", "on-demand")]
        for pool in pools:
            # Nobody moves pods to the spot pool, which moto gives away, until the last test.
            pool["spec"]["disruption"]["budgets"] = [{"nodes": "0"}]
        return pools

    def test_0_optional_apis_that_fail_do_not_hold_up_the_start(self):
        print(f"\nNodePools ready after {self.ready_seconds:.1f} s", flush=True)
        self.assertLess(self.ready_seconds, READY_SECONDS)

    def test_1_pods_get_nodes_that_are_instances(self):
        # Not of the spot pool, which moto gives away.
        web = workloads.workload("shop", "web", 30, 500, 1024, nodeSelector={POOL: "default"}, **workloads.zone_spread("web"))
        begin = time.monotonic()
        self.plane.apply(workloads.namespace("shop"), web)
        self.bound("shop", 30, 90)
        instances = self.instances()
        print(f"\n30 pods on {len(instances)} instances after {time.monotonic() - begin:.1f} s: ", end="")
        print(", ".join(sorted(f"{item['instanceType']}/{item['placement']['availabilityZone']}" for item in instances.values())), flush=True)
        self.nothing_is_leaked()
        zones = {node["metadata"]["labels"][workloads.ZONE] for node in self.mirror.nodes()}
        self.assertEqual(zones, set(aws.ZONES))
        for claim in self.claims():
            labels, instance = claim["metadata"]["labels"], instances[self.instance_of(claim)]
            self.assertEqual(labels[observe.INSTANCE_TYPE], instance["instanceType"])
            self.assertEqual(labels[observe.ZONE], instance["placement"]["availabilityZone"])
            self.assertEqual(claim["status"]["imageID"], instance["imageId"])
            self.assertIn(instance["subnetId"], self.account.subnets.values())
        self.no_errors()

    def has_tags(self, found, pool):
        """Some tags are those of a launch for the pool, among others."""
        self.assertLessEqual(launch_tags(pool).items(), found.items())

    def test_2_tags_are_those_that_the_iam_policy_demands(self):
        for instance in self.instances().values():
            self.has_tags(aws.tags_of(instance), "default")
        # moto gives volumes no tags of a fleet's request.
        asked = [call.tags() for call in self.proxy.seen("CreateFleet") if call.form.get("DryRun") != "true"]
        self.assertTrue(asked)
        for by_kind in asked:
            self.assertEqual(set(by_kind), {"fleet", "instance", "volume"})
            for found in by_kind.values():
                self.has_tags(found, "default")
        # Told once the node is registered.
        names = {self.instance_of(claim): (claim["status"]["nodeName"], key(claim)) for claim in self.claims()}
        told = lambda: {id: (tags.get("Name"), tags.get(CLAIM)) for id, item in self.instances().items() for tags in [aws.tags_of(item)]}
        harness.wait_until(lambda: told() == names, 60, "instances named after their nodes", told, every=0.5)
        self.wait(lambda: self.tagged() == len(names), 10, "NodeClaims that say so", lambda: f"{self.tagged()} of {len(names)}")
        times = [call.at for call in self.proxy.seen("CreateTags")]
        self.assertEqual(len(times), len(names))
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        self.assertGreater(min(pauses), PACE)

    def tagged(self, pool="default"):
        """How many NodeClaims of a pool say that their instance has its tags."""
        annotations = [claim["metadata"].get("annotations", {}) for claim in self.claims(pool)]
        return sum(all(given.get(name) == "true" for name in TAGGED) for given in annotations)

    def test_3_templates_and_user_data_are_read_back(self):
        self.read_back("default", "on-demand", {"network-interface"})

    def read_back(self, pool, capacity_type, kinds):
        """The launch templates of a pool are what its node class says, with tags for these kinds of resources (moto adds those of the
        template itself), and its instances have the user data of one of them."""
        profile = self.plane.api.get(f"{observe.CLASSES}/default")["status"]["instanceProfile"]
        roles = self.moto.aws.iam("GetInstanceProfile", InstanceProfileName=profile)["InstanceProfile"]["Roles"]
        self.assertEqual([role["RoleName"] for role in roles], [self.account.role])
        images = {id: name for name, id in self.moto.image_ids.items()}
        written = set()
        templates = self.templates(POOL, pool)
        self.assertTrue(templates, "there is no launch template")
        for template in templates:
            data = self.data_of(template)
            with self.subTest(template["launchTemplateName"]):
                self.has_tags(aws.tags_of(template), pool)
                tagged = {entry["resourceType"]: aws.tags_of(entry) for entry in data["tagSpecificationSet"]}
                self.assertEqual(tagged.keys() - {"launch-template"}, kinds)
                for kind in kinds:
                    self.has_tags(tagged[kind], pool)
                self.assertRegex(images[data["imageId"]], r"^amazon-eks-node-al2023-(x86_64|arm64)-")
                self.assertEqual(data["iamInstanceProfile"]["name"], profile)
                self.assertEqual(data["metadataOptions"]["httpTokens"], "required")
                groups = data["networkInterfaceSet"][0]["groupSet"]["groupId"]
                self.assertEqual(sorted(groups), sorted(self.account.security_groups))
                disk = data["blockDeviceMappingSet"][0]
                self.assertEqual((disk["deviceName"], disk["ebs"]["volumeSize"], disk["ebs"]["encrypted"]), ("/dev/xvda", "20", "true"))
                self.assertNotIn("instanceType", data, "the type is the fleet's to choose")
                written.add((data["imageId"], data["userData"]))
        parse, instances = self.parser(), self.instances()
        for claim in self.claims(pool):
            id, node = self.instance_of(claim), self.mirror.node_of(claim)
            instance, data = instances[id], self.user_data(id)
            self.assertIn((instance["imageId"], data), written)
            arch = {"amd64": "x86_64", "arm64": "arm64"}[node["metadata"]["labels"][workloads.ARCH]]
            self.assertRegex(images[instance["imageId"]], f"-{arch}-standard-")
            settings = kubelet.settings_of(data, parse)
            self.assertEqual((settings.labels[POOL], settings.labels[observe.CAPACITY_TYPE]), (pool, capacity_type))
            self.assertIn(UNREGISTERED, [{name: taint[name] for name in ("key", "effect")} for taint in settings.taints])
            self.assertEqual(settings.max_pods, self.planned(node)["pods"])
            cluster = self.cluster_of(data, parse)
            self.assertEqual((cluster["name"], cluster["apiServerEndpoint"], cluster["cidr"]), (CLUSTER, self.plane.state["api"], "10.96.0.0/16"))
            self.assertTrue(self.is_authority(cluster["certificateAuthority"]))

    def test_4_nodes_are_as_large_as_they_were_planned(self):
        for node in self.mirror.nodes():
            self.as_planned(node)

    @staticmethod
    def cluster_of(data, parse):
        """What the user data of Amazon Linux 2023 say of the cluster."""
        message = email.message_from_string(base64.b64decode(data).decode())
        parts = [part for part in message.walk() if part.get_content_type() == kubelet.NODE_CONFIG]
        return parse(parts[-1].get_payload())["spec"]["cluster"]

    def test_5_spot_pools_get_spot_instances(self):
        self.plane.apply(*one_a_node("spots", 3, "spot"))
        self.bound("spots", 3, 60)
        claims, instances = self.claims("spot"), self.instances()
        self.assertEqual(len(claims), 3)
        for claim in claims:
            self.assertEqual(claim["metadata"]["labels"][observe.CAPACITY_TYPE], "spot")
            self.assertEqual(instances[self.instance_of(claim)].get("instanceLifecycle"), "spot")
            self.has_tags(aws.tags_of(instances[self.instance_of(claim)]), "spot")
        for claim in self.claims("default"):
            self.assertIsNone(instances[self.instance_of(claim)].get("instanceLifecycle"))
        self.read_back("spot", "spot", {"network-interface", "spot-instances-request"})
        requests = self.moto.aws.ec2("DescribeSpotInstanceRequests")["spotInstanceRequestSet"]
        self.assertEqual({request["instanceId"] for request in requests}, {self.instance_of(claim) for claim in claims})
        for request in requests:
            self.has_tags(aws.tags_of(request), "spot")
        self.nothing_is_leaked()
        self.no_errors()

    def test_6_two_hundred_instances_come_at_once(self):
        begin, at = time.monotonic(), time.time()
        self.plane.apply(*one_a_node("crowd", MANY, "many"))
        launched = lambda: sum(holds(claim, "Launched") for claim in self.claims("many"))
        self.wait(lambda: launched() == MANY, 120, f"{MANY} instances launched", self.mirror.summary)
        took = time.monotonic() - begin
        self.bound("crowd", MANY, 180)
        print(f"\n{MANY} instances launched after {took:.1f} s, their pods bound after {time.monotonic() - begin:.1f} s", flush=True)
        fleets = self.fleets(at)
        if FIGURES:
            self.note_calls(at, took, len(fleets))
        print(f"{len(fleets)} fleets for {[call.count for call, _ in fleets]}, the last {max(delay for _, delay in fleets) * 1000:.0f} ms after its plan")
        print(faults.summary(self.proxy.counts(at), MANY), flush=True)
        # Two on a quiet machine; where NodeClaims are written slowly, a call is not put off until the last of them is there (29 were seen).
        self.assertLessEqual(len(fleets), MANY // 5, "equal launches share calls")
        self.assertEqual(len(self.claims("many")), MANY)
        self.assertEqual(self.mirror.record.twice, [], "room was bought twice for a pod")
        self.nothing_is_leaked()
        self.no_errors()

    def note_calls(self, at, took, fleets):
        """Notes the calls of the launches since a time, and those that tag their instances: a call for each, at their own pace."""
        tagging = lambda call: call.action == "CreateTags" or (call.action == "DescribeInstances" and call.names_instances)
        calls = collections.Counter(call.action for call in self.proxy.seen(since=at) if not tagging(call))
        note(launched={"instances": MANY, "seconds": round(took, 1), "fleets": fleets, "calls": faults.by_action(calls)})
        self.wait(lambda: self.tagged("many") == MANY, TAGGING_SECONDS, "all tagged", lambda: self.tagged("many"))
        calls = collections.Counter(call.action for call in self.proxy.seen(since=at) if tagging(call))
        note(tagged={"instances": MANY, "seconds": round(time.time() - at, 1), "calls": calls})

    def test_6b_a_plan_is_soon_a_call(self):
        self.plane.apply(*one_a_node("trickle", 1, "many"))
        self.bound("trickle", 1, 60)
        at = time.time()
        for replicas in range(2, SINGLES + 2):
            self.plane.kubectl("scale", "deployment", "server", f"--replicas={replicas}", "-n", "trickle")
            self.wait(lambda: len(self.claims("many")) == MANY + replicas, 20, "a NodeClaim for it")
        self.bound("trickle", SINGLES + 1, 60)
        delays = sorted(delay * 1000 for _, delay in self.fleets(at))
        print(f"\nfrom plan to CreateFleet, {len(delays)} plans: p50 {observe.percentile(delays, 50):.0f} ms, p99 {observe.percentile(delays, 99):.0f} ms", flush=True)
        # On a busy machine a plan may be made before the call of the one before it: those are left out.
        steps = self.steps(at)
        self.assertGreaterEqual(len(steps), SINGLES // 2)
        parts = {part: sorted(step[part] for step in steps) for part in steps[0]}
        shares = {part: {share: round(observe.percentile(values, share), 1) for share in (50, 99)} for part, values in parts.items()}
        print("; ".join(f"{part} {p[50]:.1f}, {p[99]:.1f}" for part, p in shares.items()), "(p50, p99 in ms)", flush=True)
        note(plans=len(steps), milliseconds={part: {f"p{share}": value for share, value in p.items()} for part, p in shares.items()})
        self.assertGreaterEqual(len(delays), SINGLES)
        self.assertLess(observe.percentile(delays, 50), 250)
        self.no_errors()

    def test_7_all_go_when_no_pod_is_left(self):
        begin = time.monotonic()
        for name in ("default", "spot", "many"):
            self.plane.api.patch(f"{observe.POOLS}/{name}", {"spec": {"disruption": {"budgets": [{"nodes": "100%"}, UNDRIFTED]}}})
        for space in ("shop", "spots", "crowd", "trickle"):
            self.plane.kubectl("scale", "deployments", "--all", "--replicas=0", "-n", space)
        self.wait(lambda: not self.mirror.claims() and not self.mirror.nodes(), 180, "every node gone")
        harness.wait_until(lambda: not self.instances(), 20, "every instance terminated", lambda: sorted(self.instances()), every=0.5)
        print(f"\n{MANY} nodes and the others gone after {time.monotonic() - begin:.1f} s", flush=True)
        self.no_errors()

    def test_8_templates_follow_their_class_ahead_of_launches(self):
        at = time.time()
        # Those of dry launches belong to no pool.
        new = lambda: [call for call in self.proxy.seen("CreateLaunchTemplate", at) if {"team-2", "many"} <= set(call.form.values())]
        self.plane.api.patch(f"{observe.CLASSES}/default", {"spec": {"tags": {"team": "team-2"}}})
        self.wait(new, 60, "a launch template by what the class says now")
        print(f"\nlaunch template made {time.time() - at:.1f} s after its class was changed", flush=True)
        self.assertEqual(self.fleets(at), [], "nothing was launched")
        at = time.time()
        self.plane.kubectl("scale", "deployment", "server", "--replicas=1", "-n", "crowd")
        self.bound("crowd", 1, 60)
        self.assertEqual(new(), [], "the launch found its template")
        self.no_errors()

    def test_9_each_optional_api_that_fails_is_told_once(self):
        told = lambda: [event for event in self.plane.events("default") if event["reason"].endswith("Unreadable")]
        reasons = lambda: collections.Counter(event["reason"] for event in told() if event["regarding"]["kind"] == "EC2NodeClass")
        # The SDK tries each again and again at first: they were told 70 and 100 s after the start, which has passed by now.
        everything = lambda: self.stowage.alive() and len(reasons()) >= len(UNREADABLE)
        harness.wait_until(everything, 120, "events of what can't be read", reasons, every=0.5)
        self.assertEqual(sorted(reasons()), UNREADABLE)
        # A process that is started again knows nothing of what was told.
        self.assertLessEqual(max(reasons().values()), 1 + self.stowage.restarts)
        self.assertEqual([event for event in told() if event.get("series")], [], "told again and again")


# Of what a user asks here, the cluster's facts and the plan's are not the user's to say.
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


class UserData(Service):
    """What a node class says of kubelets comes to the same in the plan, in the user data and on the node, in each image family's way."""

    settings = {"AWS_FEATURE_GATES": "NodeClassCEL=true"}

    @classmethod
    def classes(cls):
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
        return made

    @classmethod
    def pools(cls):
        pool = small("toml", "on-demand", "bottlerocket")
        pool["spec"]["template"]["spec"]["taints"] = [{"key": "dedicated", "value": "toml", "effect": "NoSchedule"}]
        return [small("sized", "on-demand"), pool]

    def test_1_nodes_are_as_their_expressions_say(self):
        self.plane.apply(*one_a_node("sized", 2, "sized"))
        self.bound("sized", 2, 90)
        parse = self.parser()
        for id in self.instances():
            told = kubelet.settings_of(self.user_data(id), parse)
            # Of 2 vCPUs and 8 GiB; 475 MiB are rounded up to 480. What fails is left out, and told.
            self.assertEqual((told.max_pods, told.kube_reserved, told.system_reserved), (20, {"cpu": "70m", "memory": "480Mi"}, {"memory": "128Mi"}))
        for node in self.mirror.nodes():
            self.assertEqual(node["status"]["allocatable"]["pods"], "20")
            self.as_planned(node)
        self.assertIn("KubeletExpressionDropped", [event["reason"] for event in self.plane.events("default")])
        self.no_errors()

    def test_2_bottlerockets_settings_are_the_users_with_ours_laid_over_them(self):
        tolerations = [{"key": "dedicated", "operator": "Exists"}]
        server = workloads.workload("toml", "server", 1, 1200, 512, nodeSelector={"team": "toml"}, tolerations=tolerations)
        self.plane.apply(workloads.namespace("toml"), server)
        self.bound("toml", 1, 90)
        (claim,), (template,) = self.claims("toml"), self.templates(POOL, "toml")
        data, node = self.data_of(template), self.mirror.node_of(claim)
        images = {id: name for name, id in self.moto.image_ids.items()}
        self.assertRegex(images[data["imageId"]], r"^bottlerocket-aws-k8s-.*-x86_64-")
        self.assertEqual([disk["deviceName"] for disk in data["blockDeviceMappingSet"]], ["/dev/xvda", "/dev/xvdb"])
        self.assertEqual(self.user_data(self.instance_of(claim)), data["userData"])
        settings = tomllib.loads(base64.b64decode(data["userData"]).decode())["settings"]
        told = settings.pop("kubernetes")
        self.assertEqual(settings, {"ntp": {"time-servers": ["169.254.169.123"]}})
        self.assertTrue(self.is_authority(told.pop("cluster-certificate")))
        labels = {"own": "kept", "team": "toml", POOL: "toml", NODE_CLASS: "bottlerocket", observe.CAPACITY_TYPE: "on-demand"}
        self.assertLessEqual(labels.items(), told.pop("node-labels").items())
        expected = {
            "api-server": self.plane.state["api"],
            "cluster-name": CLUSTER,
            "cluster-dns-ip": DNS,
            "cluster-domain": "shop.internal",
            "max-pods": self.planned(node)["pods"],
            "eviction-hard": {"memory.available": "200Mi"},
            "node-taints": {"dedicated": ["toml:NoSchedule"], UNREGISTERED["key"]: [":NoExecute"]},
        }
        self.assertEqual(told, expected)
        self.assertLessEqual(labels.items(), node["metadata"]["labels"].items())
        self.as_planned(node)
        self.no_errors()

    def test_3_the_boot_scripts_of_other_families_call_that_of_eks(self):
        # Validation has made their templates; none is launched.
        for name in SCRIPTS:
            ready = lambda name=name: self.stowage.alive() and holds(self.plane.api.get(f"{observe.CLASSES}/{name}"), "Ready")
            harness.wait_until(ready, 60, f"node class {name} ready", lambda name=name: self.why(name))
        parse = self.parser()
        (linux,), (windows,) = (self.templates(NODE_CLASS, name) for name in SCRIPTS)
        linux, windows = (self.data_of(template)["userData"] for template in (linux, windows))
        for data in (linux, windows):
            settings = kubelet.settings_of(data, parse)
            self.assertEqual(settings.labels[observe.CAPACITY_TYPE], "on-demand")
            self.assertIn(UNREGISTERED["key"], [taint["key"] for taint in settings.taints])
        parts = email.message_from_string(base64.b64decode(linux).decode()).get_payload()
        self.assertEqual(parts[0].get_payload().strip(), SCRIPTS["al2"][1])
        (call,) = re.findall(r"^/etc/eks/bootstrap\.sh .*", parts[1].get_payload().replace("\\\n", " "), re.M)
        words = shlex.split(call)
        self.assertEqual(words[1:5], [CLUSTER, "--apiserver-endpoint", self.plane.state["api"], "--b64-cluster-ca"])
        self.assertTrue(self.is_authority(words[5]))
        text = base64.b64decode(windows).decode()
        self.assertLess(text.index(SCRIPTS["windows"][1]), text.index("-EKSClusterName"))
        found = re.search(r" -EKSClusterName '(.*?)' -APIServerEndpoint '(.*?)' -Base64ClusterCA '(.*?)' ", text)
        self.assertEqual((found[1], found[2]), (CLUSTER, self.plane.state["api"]))
        self.assertTrue(self.is_authority(found[3]))

    def test_4_the_end_of_a_class_waits_for_its_claims_and_takes_what_was_made_for_it(self):
        find = lambda: self.plane.api.find(f"{observe.CLASSES}/bottlerocket")
        profiles = {name: self.plane.api.get(f"{observe.CLASSES}/{name}")["status"]["instanceProfile"] for name in ("bottlerocket", "default")}
        (claim,) = self.claims("toml")
        self.plane.api.delete(f"{observe.CLASSES}/bottlerocket")
        told = lambda: self.plane.events("bottlerocket", "WaitingOnNodeClaimTermination")
        harness.wait_until(told, 20, "an event of what it waits for", lambda: self.plane.events("bottlerocket"))
        self.assertIn(key(claim), told()[0]["note"])
        self.assertTrue(find() and self.templates(POOL, "toml"))
        self.moto.aws.iam("GetInstanceProfile", InstanceProfileName=profiles["bottlerocket"])
        self.plane.kubectl("scale", "deployment", "server", "--replicas=0", "-n", "toml")
        self.plane.api.delete(f"{observe.CLAIMS}/{key(claim)}")
        begin = time.monotonic()
        harness.wait_until(lambda: self.stowage.alive() and not find(), 60, "the class gone", find)
        print(f"\nclass gone {time.monotonic() - begin:.1f} s after its last NodeClaim was deleted", flush=True)
        self.assertEqual(self.claims("toml"), [], "it did not wait")
        self.assertEqual(self.templates(NODE_CLASS, "bottlerocket"), [])
        with self.assertRaises(aws.AwsError) as refused:
            self.moto.aws.iam("GetInstanceProfile", InstanceProfileName=profiles["bottlerocket"])
        self.assertEqual(refused.exception.code, "NoSuchEntity")
        self.assertTrue(self.templates(NODE_CLASS, "default"), "another class's went, too")
        self.moto.aws.iam("GetInstanceProfile", InstanceProfileName=profiles["default"])
        self.nothing_is_leaked()
        self.no_errors()

    def test_5_a_class_whose_max_pods_fails_is_not_ready(self):
        broken = node_class()
        broken["spec"]["kubelet"] = {"maxPods": "vcpus *"}
        self.plane.apply(broken)

        def condition():
            status = (self.plane.api.find(f"{observe.CLASSES}/default") or {}).get("status", {})
            return next((item for item in status.get("conditions", []) if item["type"] == "ValidationSucceeded"), {})

        harness.wait_until(lambda: self.stowage.alive() and condition().get("reason") == "KubeletExpressionInvalid", 60, "the class refused", condition)
        self.assertIn("spec.kubelet.maxPods", condition()["message"])


class Shells(unittest.TestCase):
    """Rust's tests of the calls alone, which want an endpoint that somebody else wrote."""

    def test_the_calls_are_understood(self):
        with aws.Moto() as moto:
            command = ["cargo", "test", "--locked", "--quiet", "--lib", "ec2::live_tests", "--", "--ignored"]
            done = subprocess.run(command, cwd=harness.ROOT, env={**os.environ, **moto.env()}, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"test result: ok\. [1-9]\d* passed")


if __name__ == "__main__":
    unittest.main(verbosity=2)
