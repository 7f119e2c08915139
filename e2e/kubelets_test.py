#!/usr/bin/env python3
"""What the tests of EC2 lean on: moto as e2e/aws.py runs it, and the kubelets that e2e/kubelets plays for its instances, in real control
planes. Needs no Rust. Run: python3 e2e/kubelets_test.py"""

import base64
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import unittest

import aws
import harness
import kubelet
import observe
import workloads

HERE = pathlib.Path(__file__).resolve().parent
UNREGISTERED = "karpenter.sh/unregistered"
STEADY = 2.0  # seconds in which what must not happen would have happened

NODE_CONFIG = """# made by Stowage
apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
metadata: {}
spec:
  cluster: {apiServerEndpoint: "https://test-cluster", certificateAuthority: Y2EK, cidr: 10.96.0.0/16, name: demo}
  kubelet:
    config:
      clusterDNS: [10.96.0.10]
      maxPods: 17
      registerWithTaints:
      - {effect: NoExecute, key: karpenter.sh/unregistered}
      - {effect: NoSchedule, key: team, value: red}
    flags:
    - --node-labels="karpenter.sh/capacity-type=on-demand,karpenter.sh/nodepool=default"
"""
USER_CONFIG = """apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  kubelet:
    config:
      maxPods: 5
      kubeReserved: {cpu: 200m, memory: 1Gi}
      evictionHard: {memory.available: "5%"}
"""


def mime(*parts):
    """User data of several parts, each a content type and a text."""
    lines = ["MIME-Version: 1.0", 'Content-Type: multipart/mixed; boundary="//"', ""]
    for kind, content in parts:
        lines += ["--//", f"Content-Type: {kind}", "", content]
    return "\n".join([*lines, "--//--", ""])


def encoded(text):
    return base64.b64encode(text.encode()).decode()


AL2023 = mime(("text/x-shellscript; charset=us-ascii", "echo hello"), (kubelet.NODE_CONFIG, NODE_CONFIG))


def eventually(check, what, seconds=20.0):
    return harness.wait_until(check, seconds, what)


class UserData(unittest.TestCase):
    """User data of every image family, as Karpenter writes them."""

    @classmethod
    def setUpClass(cls):
        home = cls.enterClassContext(tempfile.TemporaryDirectory())
        built = harness.run(HERE / "tools" / "build", timeout=1800).stdout.splitlines()[-1]
        cls.parse_yaml = staticmethod(kubelet.yaml_by(pathlib.Path(built) / "kubectl", home))

    def settings(self, text):
        return kubelet.settings_of(encoded(text), self.parse_yaml)

    def test_amazon_linux_2023_takes_the_node_configs_in_order(self):
        settings = self.settings(mime((kubelet.NODE_CONFIG, USER_CONFIG), (kubelet.NODE_CONFIG, NODE_CONFIG)))
        self.assertEqual(settings.labels, {"karpenter.sh/capacity-type": "on-demand", "karpenter.sh/nodepool": "default"})
        red = {"key": "team", "value": "red", "effect": "NoSchedule"}
        self.assertEqual(settings.taints, [{"key": UNREGISTERED, "effect": "NoExecute"}, red])
        self.assertEqual(settings.max_pods, 17)
        self.assertEqual(settings.kube_reserved, {"cpu": "200m", "memory": "1Gi"})
        self.assertEqual(settings.eviction_hard, {"memory.available": "5%"})

    def test_amazon_linux_2_takes_the_extra_arguments_of_bootstrap(self):
        script = """#!/bin/bash -xe
exec > >(tee /var/log/user-data.log) 2>&1
/etc/eks/bootstrap.sh 'demo' --apiserver-endpoint 'https://x' --b64-cluster-ca 'Y2EK' \\
--dns-cluster-ip '10.96.0.10' \\
--use-max-pods false \\
--kubelet-extra-args '--node-labels="a=b,karpenter.sh/nodepool=default" --max-pods=29 \
--register-with-taints="x=y:NoSchedule,karpenter.sh/unregistered:NoExecute" \
--kube-reserved="cpu=1,memory=2Gi" --system-reserved="cpu=100m" --eviction-hard="memory.available<5%"'
"""
        for text in (script, mime(("text/x-shellscript", "echo mine"), ("text/x-shellscript", script))):
            with self.subTest(text[:20]):
                settings = self.settings(text)
                self.assertEqual(settings.labels, {"a": "b", "karpenter.sh/nodepool": "default"})
                red = {"key": "x", "value": "y", "effect": "NoSchedule"}
                self.assertEqual(settings.taints, [red, {"key": UNREGISTERED, "effect": "NoExecute"}])
                self.assertEqual((settings.max_pods, settings.kube_reserved), (29, {"cpu": "1", "memory": "2Gi"}))
                self.assertEqual((settings.system_reserved, settings.eviction_hard), ({"cpu": "100m"}, {"memory.available": "5%"}))

    def test_bottlerocket_takes_the_kubernetes_settings(self):
        settings = self.settings(
            """[settings.kubernetes]
cluster-name = 'demo'
max-pods = 29
[settings.kubernetes.node-labels]
'karpenter.sh/nodepool' = 'default'
[settings.kubernetes.node-taints]
'karpenter.sh/unregistered' = [':NoExecute']
team = ['red:NoSchedule']
[settings.kubernetes.kube-reserved]
cpu = '90m'
"""
        )
        self.assertEqual(settings.labels, {"karpenter.sh/nodepool": "default"})
        red = {"key": "team", "value": "red", "effect": "NoSchedule"}
        self.assertEqual(settings.taints, [{"key": UNREGISTERED, "effect": "NoExecute"}, red])
        self.assertEqual((settings.max_pods, settings.kube_reserved), (29, {"cpu": "90m"}))

    def test_windows_takes_the_extra_arguments(self):
        call = """& $EKSBootstrapScriptFile -EKSClusterName 'demo' -KubeletExtraArgs '--node-labels="a=b" --max-pods=110'"""
        text = f"<powershell>\n{call}\n</powershell>"
        settings = self.settings(text)
        self.assertEqual((settings.labels, settings.max_pods, settings.os), ({"a": "b"}, 110, "windows"))

    def test_an_image_of_someones_own_registers_with_the_taint_of_its_contract(self):
        for text in ("", "#!/bin/sh\n/opt/join-cluster\n", "[settings.host]\n"):
            with self.subTest(text):
                self.assertEqual(self.settings(text), kubelet.Settings(taints=[{"key": UNREGISTERED, "effect": "NoExecute"}]))

    def test_user_data_that_no_node_boots_from_are_an_error(self):
        broken = NODE_CONFIG.replace("kind: NodeConfig", "kind: [")
        for text in (mime((kubelet.NODE_CONFIG, broken)), "/etc/eks/bootstrap.sh 'demo --kubelet-extra-args x\n"):
            with self.subTest(text[-40:]), self.assertRaises(ValueError):
                self.settings(text)


class Moto(unittest.TestCase):
    """The server, and what a cluster finds in its account."""

    @classmethod
    def setUpClass(cls):
        cls.moto = cls.enterClassContext(aws.Moto())
        cls.account = cls.moto.account("demo")

    def found(self, action, result, tag="karpenter.sh/discovery"):
        filters = [{"Name": f"tag:{tag}", "Value": ["demo"]}]
        return list(self.moto.aws.ec2_pages(action, result, Filter=filters))

    def test_two_run_side_by_side_and_stop_alone(self):
        with aws.Moto() as other:
            self.assertNotEqual(other.endpoint, self.moto.endpoint)
            vpcs = other.aws.ec2("DescribeVpcs")["vpcSet"]
            self.assertNotIn(self.account.vpc, [vpc["vpcId"] for vpc in vpcs])
        self.assertIsNotNone(other.process.poll())
        self.assertFalse(other.dir.exists())
        self.moto.aws.ec2("DescribeVpcs", VpcId=[self.account.vpc])

    def test_it_stops_when_a_test_fails(self):
        with self.assertRaisesRegex(ZeroDivisionError, "division"), aws.Moto() as other:
            self.assertIsNone(other.process.poll())
            _ = 1 / 0
        self.assertIsNotNone(other.process.poll())

    def test_discovery_finds_what_the_tags_select(self):
        subnets = {subnet["availabilityZone"]: subnet["subnetId"] for subnet in self.found("DescribeSubnets", "subnetSet")}
        self.assertEqual(subnets, self.account.subnets)
        self.assertEqual(sorted(subnets), aws.ZONES)
        groups = [group["groupId"] for group in self.found("DescribeSecurityGroups", "securityGroupInfo")]
        self.assertEqual(sorted(groups), sorted(self.account.security_groups))
        images = {image["name"]: image["architecture"] for image in self.found("DescribeImages", "imagesSet")}
        self.assertEqual(images, {"own-node-x86_64": "x86_64", "own-node-arm64": "arm64"})

    def test_aliases_resolve_to_images_of_their_architecture(self):
        for arch in ("x86_64", "arm64"):
            path = f"/aws/service/eks/optimized-ami/{aws.VERSION}/amazon-linux-2023/{arch}/standard/recommended/image_id"
            id = self.moto.aws.ssm("GetParameter", Name=path)["Parameter"]["Value"]
            image = self.moto.aws.ec2("DescribeImages", ImageId=[id])["imagesSet"][0]
            self.assertEqual(image["architecture"], arch)
        with self.assertRaises(aws.AwsError) as refused:
            self.moto.aws.ssm("GetParameter", Name="/aws/service/eks/optimized-ami/1.00/amazon-linux-2/recommended/image_id")
        self.assertEqual(refused.exception.code, "ParameterNotFound")

    def test_the_role_the_queue_and_the_cluster_are_there(self):
        client = self.moto.aws
        self.assertEqual(client.iam("GetRole", RoleName=self.account.role)["Role"]["RoleName"], self.account.role)
        url = client.sqs("GetQueueUrl", QueueName="demo")["QueueUrl"]
        self.assertEqual(url, self.account.queue_url)
        client.sqs("SendMessage", QueueUrl=url, MessageBody="hello")
        message = client.sqs("ReceiveMessage", QueueUrl=url, WaitTimeSeconds=5)["Messages"][0]
        self.assertEqual(message["Body"], "hello")
        client.sqs("DeleteMessage", QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        cluster = client.eks("GET", "/clusters/demo")["cluster"]
        self.assertEqual((cluster["version"], cluster["kubernetesNetworkConfig"]["serviceIpv4Cidr"]), (aws.VERSION, "10.96.0.0/16"))

    def test_errors_carry_their_code(self):
        with self.assertRaises(aws.AwsError) as refused:
            self.moto.aws.ec2("DescribeInstances", InstanceId=["i-0123456789abcdef0"])
        self.assertEqual((refused.exception.status, refused.exception.code), (400, "InvalidInstanceID.NotFound"))
        with self.assertRaises(aws.AwsError) as refused:
            self.moto.aws.iam("GetInstanceProfile", InstanceProfileName="none")
        self.assertEqual((refused.exception.status, refused.exception.code), (404, "NoSuchEntity"))

    def test_requests_are_signed_as_aws_says(self):
        # The example "get-vanilla" of AWS's own test suite for Signature Version 4.
        client = aws.Aws("https://example.amazonaws.com", credentials=("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", None))
        when = aws.datetime.datetime(2015, 8, 30, 12, 36, tzinfo=aws.datetime.UTC)
        signed = client.signature("service", "GET", "/", b"", {}, now=when)["Authorization"]
        self.assertTrue(signed.endswith("Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"), signed)

    def test_resources_are_those_that_karpenter_computes(self):
        # Type -> pods, and allocatable CPU and memory, from Karpenter's published table of instance types.
        wanted = {
            "m5.large": (29, "1930m", 6903),
            "a1.medium": (8, "940m", 1392),
            "t4g.small": (11, "1930m", 1359),
            "m5.metal": (737, "95690m", 355262),
            "g4ad.16xlarge": (234, "63770m", 239554),
            "p5.48xlarge": (100, "191450m", 1938410),
            "trn1.32xlarge": (247, "127610m", 481894),
            "inf1.24xlarge": (321, "95690m", 177976),
        }
        found = self.moto.aws.ec2("DescribeInstanceTypes", InstanceType=sorted(wanted))["instanceTypeSet"]
        self.assertEqual(len(found), len(wanted))
        for shape in found:
            with self.subTest(shape["instanceType"]):
                pods, cpu, mib = wanted[shape["instanceType"]]
                capacity, allocatable = kubelet.resources(shape, kubelet.Settings())
                self.assertEqual((allocatable["pods"], allocatable["cpu"]), (str(pods), cpu))
                self.assertEqual(allocatable["memory"], f"{mib * 1024}Ki")
                self.assertEqual(allocatable["ephemeral-storage"], f"{17 << 20}Ki")
        devices = {shape["instanceType"]: kubelet.devices(shape) for shape in found}
        self.assertEqual(devices["g4ad.16xlarge"], {"amd.com/gpu": 4})
        self.assertEqual(devices["p5.48xlarge"], {"nvidia.com/gpu": 8})

    def test_settings_change_what_is_allocatable(self):
        shape = self.moto.aws.ec2("DescribeInstanceTypes", InstanceType=["m5.large"])["instanceTypeSet"][0]
        reserved = {"kube_reserved": {"cpu": "200m", "memory": "1Gi"}, "system_reserved": {"memory": "500Mi"}}
        settings = kubelet.Settings(max_pods=110, eviction_hard={"memory.available": "10%"}, **reserved)
        capacity, allocatable = kubelet.resources(shape, settings)
        total = int(capacity["memory"].removesuffix("Ki"))
        self.assertEqual((allocatable["pods"], allocatable["cpu"]), ("110", "1800m"))
        self.assertAlmostEqual(int(allocatable["memory"].removesuffix("Ki")), total - 1524 * 1024 - total / 10, delta=1)


class Nodes(unittest.TestCase):
    """Instances become Nodes of a real control plane, and go."""

    @classmethod
    def setUpClass(cls):
        cls.plane = cls.enterClassContext(harness.ControlPlane())
        cls.moto = cls.enterClassContext(aws.Moto())
        cls.account = cls.moto.account("demo")
        cls.kubelets = cls.enterClassContext(harness.Kubelets(cls.plane, cls.moto.endpoint, "100ms-300ms"))
        cls.mirror = cls.enterClassContext(NodesAndPods(cls.plane.api))

    def launch(self, *arguments, **more):
        made = self.moto.launch(self.account, *arguments, **{"data": AL2023, **more})
        self.addCleanup(self.gone, [instance["instanceId"] for instance in made])
        return made

    def gone(self, ids):
        self.moto.terminate(*ids)
        self.mirror.wait(lambda: not any(self.mirror.node_by(id) for id in ids), 20, "the Nodes gone")

    def node(self, instance):
        """The instance's Node, once it is there."""
        id = instance["instanceId"]
        return self.mirror.wait(lambda: self.mirror.node_by(id), 20, f"the Node of {id}", lambda: self.kubelets.log.read_text()[-2000:])

    def test_an_instance_boots_as_its_user_data_say_runs_pods_and_goes(self):
        begin = time.monotonic()
        instance = self.launch()[0]
        node = self.node(instance)
        took = time.monotonic() - begin
        id, name = instance["instanceId"], instance["privateDnsName"]
        labels = node["metadata"]["labels"]
        wanted = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/arch": "amd64",
            "kubernetes.io/os": "linux",
            "node.kubernetes.io/instance-type": "m5.large",
            "topology.kubernetes.io/zone": "us-east-1b",
            "topology.kubernetes.io/region": "us-east-1",
            "karpenter.sh/capacity-type": "on-demand",
            "karpenter.sh/nodepool": "default",
        }
        self.assertEqual({key: labels.get(key) for key in wanted}, wanted)
        self.assertEqual(node["metadata"]["name"], name)
        self.assertEqual(node["spec"]["providerID"], f"aws:///us-east-1b/{id}")
        self.assertEqual((node["status"]["capacity"]["cpu"], node["status"]["allocatable"]["pods"]), ("2", "17"))
        self.assertEqual(node["status"]["addresses"][0], {"type": "InternalIP", "address": instance["privateIpAddress"]})
        self.assertEqual(node["status"]["nodeInfo"]["kubeletVersion"], self.plane.api.get("/version")["gitVersion"])

        ready = lambda: (node := self.mirror.node_by(id)) and observe.holds(node, "Ready") and node
        taints = lambda node: {taint["key"] for taint in node["spec"].get("taints", [])}
        settled = lambda: (node := ready()) and taints(node) == {UNREGISTERED, "team"}
        self.mirror.wait(settled, 20, "the node ready with the taints of its user data", ready)
        print(f"\nNode {took:.1f} s after the launch, ready after {time.monotonic() - begin:.1f} s", flush=True)

        tolerations = [{"key": "team", "operator": "Exists"}]
        self.plane.apply(workloads.namespace("apps"), workloads.workload("apps", "web", 2, 100, 128, tolerations=tolerations))
        account = "/api/v1/namespaces/apps/serviceaccounts/default"
        eventually(lambda: self.plane.api.find(account), "the namespace's service account")
        pods = lambda: self.mirror.pods("apps")
        self.mirror.wait(lambda: len(pods()) == 2, 20, "the pods made")
        self.assertTrue(all(not observe.bound_to(pod) for pod in pods()), "the unregistered taint kept no pod off")
        rest = [taint for taint in self.mirror.node_by(id)["spec"]["taints"] if taint["key"] != UNREGISTERED]
        self.plane.api.patch(f"{observe.NODES}/{name}", {"spec": {"taints": rest}})
        self.mirror.wait(lambda: len(pods()) == 2 and all(observe.holds(pod, "Ready") for pod in pods()), 20, "the pods running")
        self.assertEqual({observe.bound_to(pod) for pod in pods()}, {name})

        begin = time.monotonic()
        self.moto.terminate(id)
        self.mirror.wait(lambda: not self.mirror.node_by(id), 20, "the Node gone")
        print(f"\nNode gone {time.monotonic() - begin:.1f} s after the instance", flush=True)
        self.plane.kubectl("delete", "namespace", "apps", "--wait=false")

    def test_arm_and_accelerated_instances_say_what_they_have(self):
        graviton = self.node(self.launch(kind="m7g.large", zone="us-east-1a")[0])
        self.assertEqual(graviton["metadata"]["labels"]["kubernetes.io/arch"], "arm64")
        self.assertEqual(graviton["metadata"]["labels"]["topology.kubernetes.io/zone"], "us-east-1a")
        gpu = self.node(self.launch(kind="g5.xlarge")[0])
        self.assertEqual(gpu["status"]["allocatable"]["nvidia.com/gpu"], "1")

    def test_instances_of_nobody_and_of_broken_user_data_are_no_nodes(self):
        broken = mime((kubelet.NODE_CONFIG, "kind: ["))
        strangers = [*self.launch(Name="bastion"), *self.launch(**{"kubernetes.io/cluster/demo": "shared"}), *self.launch(data=broken)]
        unknown = self.launch(kind="m5.nonsense")
        # One that is a node shows that the others were looked at.
        self.node(self.launch()[0])
        time.sleep(STEADY)
        for instance in [*strangers, *unknown]:
            self.assertIsNone(self.mirror.node_by(instance["instanceId"]))
        text = self.kubelets.log.read_text()
        for instance in (strangers[2], unknown[0]):
            self.assertEqual(len(re.findall(f"{instance['instanceId']}.* never becomes a Node", text)), 1, text)

    def test_kubelets_that_were_killed_go_on_from_what_there_is(self):
        stays, goes = self.launch(2)
        for instance in (stays, goes):
            self.node(instance)
        before = self.mirror.node_by(stays["instanceId"])["metadata"]["uid"]
        os.kill(self.kubelets.pid, signal.SIGKILL)
        self.moto.terminate(goes["instanceId"])
        comes = self.launch()[0]
        time.sleep(STEADY)
        self.assertIsNotNone(self.mirror.node_by(goes["instanceId"]), "somebody else took the Node away")
        self.kubelets.up()
        self.node(comes)
        self.mirror.wait(lambda: not self.mirror.node_by(goes["instanceId"]), 20, "the Node of the terminated instance gone")
        self.assertEqual(self.mirror.node_by(stays["instanceId"])["metadata"]["uid"], before)

    def test_a_node_that_was_deleted_does_not_come_back(self):
        instance = self.launch()[0]
        node = self.node(instance)
        self.plane.api.delete(f"{observe.NODES}/{node['metadata']['name']}")
        self.mirror.wait(lambda: not self.mirror.node_by(instance["instanceId"]), 20, "the Node gone")
        time.sleep(STEADY)
        self.assertIsNone(self.mirror.node_by(instance["instanceId"]))

    def test_a_hundred_instances_boot_at_once(self):
        begin = time.monotonic()
        ids = [instance["instanceId"] for instance in self.launch(100)]
        ready = lambda: sum(bool((node := self.mirror.node_by(id)) and observe.holds(node, "Ready")) for id in ids)
        self.mirror.wait(lambda: ready() == 100, 60, "a hundred nodes ready", ready)
        print(f"\n100 nodes ready after {time.monotonic() - begin:.1f} s", flush=True)


class NodesAndPods(observe.Mirror):
    """A mirror of a control plane that knows no NodeClaims."""

    def __init__(self, api):
        super().__init__(api)
        self.watches = [watch for watch in self.watches if watch.path != observe.CLAIMS]

    def node_by(self, id):
        """The Node of an instance, or None."""
        return next((node for node in self.nodes() if node["spec"].get("providerID", "").endswith(f"/{id}")), None)


class LifeCycle(unittest.TestCase):
    """The command itself."""

    def setUp(self):
        self.plane = self.enterContext(harness.ControlPlane())
        self.moto = self.enterContext(aws.Moto())
        self.kubelets = harness.Kubelets(self.plane, self.moto.endpoint, cluster="demo")
        self.addCleanup(self.kubelets.down)

    def ours(self):
        """Processes of kubelets in this control plane."""
        done = subprocess.run(["pgrep", "-f", f"kubelets play {self.plane.dir} "], capture_output=True, text=True, check=False)
        return done.stdout.split()

    def test_up_is_refused_twice_and_down_leaves_nothing_and_may_be_repeated(self):
        self.kubelets.up()
        again = self.kubelets.up(check=False)
        self.assertEqual(again.returncode, 1)
        self.assertIn("running in", again.stderr)
        self.assertIn("kubelets down", again.stderr)
        self.assertEqual(self.ours(), [str(self.kubelets.pid)])
        self.kubelets.down()
        self.kubelets.down()
        self.assertEqual(self.ours(), [])
        self.kubelets.up()
        harness.run(HERE / "control-plane", "down", self.plane.dir)
        eventually(lambda: not self.ours(), "the kubelets of a control plane that is down ended")
        nowhere = self.kubelets.up(check=False)
        self.assertIn("no running control plane", nowhere.stderr)

    def test_an_endpoint_that_can_not_be_asked_is_told_and_one_that_goes_away_takes_no_node_with_it(self):
        refused = self.kubelets.up("http://127.0.0.1:1", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("http://127.0.0.1:1", refused.stderr)
        self.assertIn("refused", refused.stderr)
        self.assertEqual(self.ours(), [])
        self.assertIn("no endpoint", self.kubelets.up("127.0.0.1", check=False).stderr)

        self.kubelets.up()
        account = self.moto.account("demo")
        self.moto.launch(account, **{"kubernetes.io/cluster/other": "owned"})
        wanted = self.moto.launch(account)[0]["privateDnsName"]
        nodes = lambda: [node["metadata"]["name"] for node in self.plane.api.items(observe.NODES)]
        eventually(nodes, "the Node")
        self.moto.stop()
        eventually(lambda: "trying again" in self.kubelets.log.read_text(), "the outage noticed")
        time.sleep(STEADY)
        self.assertEqual(nodes(), [wanted])
        self.assertEqual(self.kubelets.log.read_text().count("trying again"), 1)
        self.assertEqual(len(self.ours()), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
