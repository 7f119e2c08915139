"""The simulated EC2 that other tests depend on: moto as e2e/aws.py runs it, and the kubelets that e2e/kubelets simulates for its instances
in real control planes. Needs no Rust."""

import base64
import os
import re
import signal
import time

import botocore.exceptions
import pytest

import aws
import harness
import kubelet
import kube
import observe
import workloads
from kube import bound_to, is_true, taint_keys
from waiting import wait_until

UNREGISTERED = "karpenter.sh/unregistered"
IDLE_SECONDS = 2.0  # in which an unwanted change would have happened

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
    """Multipart user data; each part is a content type and a text."""
    lines = ["MIME-Version: 1.0", 'Content-Type: multipart/mixed; boundary="//"', ""]
    for kind, content in parts:
        lines += ["--//", f"Content-Type: {kind}", "", content]
    return "\n".join([*lines, "--//--", ""])


AL2023 = mime(("text/x-shellscript; charset=us-ascii", "echo hello"), (kubelet.NODE_CONFIG, NODE_CONFIG))


def settings_of(text):
    return kubelet.settings_of(base64.b64encode(text.encode()).decode())


class TestUserData:
    """User data of every image family, in the form that Karpenter renders."""

    def test_amazon_linux_2023_merges_the_node_configs_in_order(self):
        settings = settings_of(mime((kubelet.NODE_CONFIG, USER_CONFIG), (kubelet.NODE_CONFIG, NODE_CONFIG)))
        assert settings.labels == {"karpenter.sh/capacity-type": "on-demand", "karpenter.sh/nodepool": "default"}
        red = {"key": "team", "value": "red", "effect": "NoSchedule"}
        assert settings.taints == [{"key": UNREGISTERED, "effect": "NoExecute"}, red]
        assert settings.max_pods == 17
        assert settings.kube_reserved == {"cpu": "200m", "memory": "1Gi"}
        assert settings.eviction_hard == {"memory.available": "5%"}

    def test_amazon_linux_2_applies_the_extra_arguments_of_bootstrap(self, subtests):
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
            with subtests.test(text[:20]):
                settings = settings_of(text)
                assert settings.labels == {"a": "b", "karpenter.sh/nodepool": "default"}
                red = {"key": "x", "value": "y", "effect": "NoSchedule"}
                assert settings.taints == [red, {"key": UNREGISTERED, "effect": "NoExecute"}]
                assert (settings.max_pods, settings.kube_reserved) == (29, {"cpu": "1", "memory": "2Gi"})
                assert (settings.system_reserved, settings.eviction_hard) == ({"cpu": "100m"}, {"memory.available": "5%"})

    def test_bottlerocket_applies_the_kubernetes_settings(self):
        settings = settings_of(
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
        assert settings.labels == {"karpenter.sh/nodepool": "default"}
        red = {"key": "team", "value": "red", "effect": "NoSchedule"}
        assert settings.taints == [{"key": UNREGISTERED, "effect": "NoExecute"}, red]
        assert (settings.max_pods, settings.kube_reserved) == (29, {"cpu": "90m"})

    def test_windows_applies_the_extra_arguments(self):
        call = """& $EKSBootstrapScriptFile -EKSClusterName 'demo' -KubeletExtraArgs '--node-labels="a=b" --max-pods=110'"""
        text = f"<powershell>\n{call}\n</powershell>"
        settings = settings_of(text)
        assert (settings.labels, settings.max_pods, settings.os) == ({"a": "b"}, 110, "windows")

    def test_a_custom_image_registers_with_the_unregistered_taint(self, subtests):
        for text in ("", "#!/bin/sh\n/opt/join-cluster\n", "[settings.host]\n"):
            with subtests.test(text):
                assert settings_of(text) == kubelet.Settings(taints=[{"key": UNREGISTERED, "effect": "NoExecute"}])

    def test_invalid_user_data_is_an_error(self, subtests):
        broken = NODE_CONFIG.replace("kind: NodeConfig", "kind: [")
        for text in (mime((kubelet.NODE_CONFIG, broken)), "/etc/eks/bootstrap.sh 'demo --kubelet-extra-args x\n"):
            with subtests.test(text[-40:]), pytest.raises(ValueError):
                settings_of(text)


@pytest.fixture(scope="class")
def account(moto):
    return moto.account("demo")


@pytest.mark.usefixtures("account")
class TestMoto:
    """The server, and the resources of a cluster in its account."""

    def discovered(self, moto, operation, result):
        return list(moto.aws.all_of(operation, result, Filters=aws.tagged(**{"karpenter.sh/discovery": "demo"})))

    def test_two_run_concurrently_and_stop_independently(self, moto, account):
        with aws.Moto() as other:
            assert other.endpoint != moto.endpoint
            vpcs = other.aws.ec2.describe_vpcs()["Vpcs"]
            assert account.vpc not in [vpc["VpcId"] for vpc in vpcs]
        assert other.process.poll() is not None
        assert not other.dir.exists()
        assert moto.aws.ec2.describe_vpcs(VpcIds=[account.vpc])["Vpcs"]

    def test_it_stops_when_a_test_fails(self):
        with pytest.raises(ZeroDivisionError), aws.Moto() as other:
            assert other.process.poll() is None
            _ = 1 / 0
        assert other.process.poll() is not None

    def test_discovery_finds_tagged_resources(self, moto, account):
        subnets = {subnet["AvailabilityZone"]: subnet["SubnetId"] for subnet in self.discovered(moto, "describe_subnets", "Subnets")}
        assert subnets == account.subnets
        assert sorted(subnets) == aws.ZONES
        groups = [group["GroupId"] for group in self.discovered(moto, "describe_security_groups", "SecurityGroups")]
        assert sorted(groups) == sorted(account.security_groups)
        images = {image["Name"]: image["Architecture"] for image in self.discovered(moto, "describe_images", "Images")}
        assert images == {"own-node-x86_64": "x86_64", "own-node-arm64": "arm64"}

    def test_aliases_resolve_to_images_of_their_architecture(self, moto):
        for arch in ("x86_64", "arm64"):
            path = f"/aws/service/eks/optimized-ami/{aws.VERSION}/amazon-linux-2023/{arch}/standard/recommended/image_id"
            id = moto.aws.ssm.get_parameter(Name=path)["Parameter"]["Value"]
            image = moto.aws.ec2.describe_images(ImageIds=[id])["Images"][0]
            assert image["Architecture"] == arch
        with pytest.raises(moto.aws.ssm.exceptions.ParameterNotFound):
            moto.aws.ssm.get_parameter(Name="/aws/service/eks/optimized-ami/1.00/amazon-linux-2/recommended/image_id")

    def test_the_role_the_queue_and_the_cluster_exist(self, moto, account):
        assert moto.aws.iam.get_role(RoleName=account.role)["Role"]["RoleName"] == account.role
        sqs = moto.aws.sqs
        url = sqs.get_queue_url(QueueName="demo")["QueueUrl"]
        assert url == account.queue_url
        sqs.send_message(QueueUrl=url, MessageBody="hello")
        message = sqs.receive_message(QueueUrl=url, WaitTimeSeconds=5)["Messages"][0]
        assert message["Body"] == "hello"
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        cluster = moto.aws.eks.describe_cluster(name="demo")["cluster"]
        assert (cluster["version"], cluster["kubernetesNetworkConfig"]["serviceIpv4Cidr"]) == (aws.VERSION, "10.96.0.0/16")

    def test_errors_have_their_code(self, moto):
        with pytest.raises(botocore.exceptions.ClientError) as refused:
            moto.aws.ec2.describe_instances(InstanceIds=["i-0123456789abcdef0"])
        assert (aws.status(refused.value), aws.code(refused.value)) == (400, "InvalidInstanceID.NotFound")
        with pytest.raises(botocore.exceptions.ClientError) as refused:
            moto.aws.iam.get_instance_profile(InstanceProfileName="none")
        assert (aws.status(refused.value), aws.code(refused.value)) == (404, "NoSuchEntity")

    def test_resources_are_those_that_karpenter_computes(self, moto, subtests):
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
        found = moto.aws.ec2.describe_instance_types(InstanceTypes=sorted(wanted))["InstanceTypes"]
        assert len(found) == len(wanted)
        for shape in found:
            with subtests.test(shape["InstanceType"]):
                pods, cpu, mib = wanted[shape["InstanceType"]]
                _, allocatable = kubelet.resources(shape, kubelet.Settings())
                assert (allocatable["pods"], allocatable["cpu"]) == (str(pods), cpu)
                assert allocatable["memory"] == f"{mib * 1024}Ki"
                assert allocatable["ephemeral-storage"] == f"{17 << 20}Ki"
        devices = {shape["InstanceType"]: kubelet.devices(shape) for shape in found}
        assert devices["g4ad.16xlarge"] == {"amd.com/gpu": 4}
        assert devices["p5.48xlarge"] == {"nvidia.com/gpu": 8}

    def test_settings_change_allocatable(self, moto):
        shape = moto.aws.ec2.describe_instance_types(InstanceTypes=["m5.large"])["InstanceTypes"][0]
        reserved = {"kube_reserved": {"cpu": "200m", "memory": "1Gi"}, "system_reserved": {"memory": "500Mi"}}
        settings = kubelet.Settings(max_pods=110, eviction_hard={"memory.available": "10%"}, **reserved)
        capacity, allocatable = kubelet.resources(shape, settings)
        total = int(capacity["memory"].removesuffix("Ki"))
        assert (allocatable["pods"], allocatable["cpu"]) == ("110", "1800m")
        assert int(allocatable["memory"].removesuffix("Ki")) == pytest.approx(total - 1524 * 1024 - total / 10, abs=1)


class Instances:
    """Instances of moto that become Nodes of a control plane."""

    def __init__(self, plane, moto, account, kubelets, mirror):
        self.plane, self.moto, self.account, self.kubelets, self.mirror = plane, moto, account, kubelets, mirror
        self.ids = []

    def launch(self, *arguments, **more):
        made = self.moto.launch(self.account, *arguments, **{"data": AL2023, **more})
        self.ids += [instance["InstanceId"] for instance in made]
        return made

    def clear(self):
        """Terminates every instance that was launched."""
        if self.ids:
            self.moto.terminate(*self.ids)
            self.mirror.wait(lambda: not any(self.of(id) for id in self.ids), 20, "the Nodes deleted")
            self.ids = []

    def of(self, id):
        return self.mirror.node_of_instance(id)

    def node(self, instance):
        """The instance's Node, once it is registered."""
        id = instance["InstanceId"]
        return self.mirror.wait(lambda: self.of(id), 20, f"the Node of {id}", lambda: self.kubelets.log.read_text()[-2000:])

    def wait_deleted(self, id):
        self.mirror.wait(lambda: not self.of(id), 20, f"the Node of {id} deleted")


@pytest.fixture(scope="class")
def running(control_plane, moto, account):
    with (
        harness.Kubelets(control_plane, moto.endpoint, "100ms-300ms") as kubelets,
        observe.NodeMirror(control_plane.api) as mirror,
    ):
        yield Instances(control_plane, moto, account, kubelets, mirror)


@pytest.fixture
def instances(running):
    yield running
    running.clear()


class TestNodes:
    """Instances become Nodes of a real control plane, and their Nodes are deleted with them."""

    def test_an_instance_boots_by_its_user_data_runs_pods_and_terminates(self, instances):
        plane, mirror = instances.plane, instances.mirror
        begin = time.monotonic()
        instance = instances.launch()[0]
        node = instances.node(instance)
        took = time.monotonic() - begin
        id, name = instance["InstanceId"], instance["PrivateDnsName"]
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
        labels = node["metadata"]["labels"]
        assert {key: labels.get(key) for key in wanted} == wanted
        assert node["metadata"]["name"] == name
        assert node["spec"]["providerID"] == f"aws:///us-east-1b/{id}"
        assert (node["status"]["capacity"]["cpu"], node["status"]["allocatable"]["pods"]) == ("2", "17")
        assert node["status"]["addresses"][0] == {"type": "InternalIP", "address": instance["PrivateIpAddress"]}
        assert node["status"]["nodeInfo"]["kubeletVersion"] == plane.api.version()

        ready = lambda: (node := instances.of(id)) and is_true(node, "Ready") and node
        settled = lambda: (node := ready()) and taint_keys(node) == {UNREGISTERED, "team"}
        mirror.wait(settled, 20, "the node ready with the taints of its user data", ready)
        print(f"\nNode {took:.1f} s after the launch, ready after {time.monotonic() - begin:.1f} s", flush=True)

        tolerations = [{"key": "team", "operator": "Exists"}]
        plane.apply(workloads.namespace("apps"), workloads.workload("apps", "web", 2, 100, 128, tolerations=tolerations))
        plane.has_service_account("apps")
        pods = lambda: mirror.pods("apps")
        mirror.wait(lambda: len(pods()) == 2, 20, "the pods created")
        assert not any(bound_to(pod) for pod in pods()), "the unregistered taint did not prevent scheduling"
        rest = [taint for taint in instances.of(id)["spec"]["taints"] if taint["key"] != UNREGISTERED]
        plane.api.patch("Node", name, {"spec": {"taints": rest}})
        mirror.wait(lambda: len(pods()) == 2 and all(is_true(pod, "Ready") for pod in pods()), 20, "the pods running")
        assert {bound_to(pod) for pod in pods()} == {name}

        begin = time.monotonic()
        instances.moto.terminate(id)
        instances.wait_deleted(id)
        print(f"\nNode deleted {time.monotonic() - begin:.1f} s after the instance", flush=True)
        plane.api.delete("Namespace", "apps")

    def test_arm_and_accelerated_instances_report_their_architecture_and_devices(self, instances):
        graviton = instances.node(instances.launch(kind="m7g.large", zone="us-east-1a")[0])
        assert graviton["metadata"]["labels"]["kubernetes.io/arch"] == "arm64"
        assert graviton["metadata"]["labels"]["topology.kubernetes.io/zone"] == "us-east-1a"
        gpu = instances.node(instances.launch(kind="g5.xlarge")[0])
        assert gpu["status"]["allocatable"]["nvidia.com/gpu"] == "1"

    def test_instances_of_no_cluster_and_with_invalid_user_data_are_not_nodes(self, instances):
        invalid = mime((kubelet.NODE_CONFIG, "kind: ["))
        foreign = [*instances.launch(Name="bastion"), *instances.launch(**{"kubernetes.io/cluster/demo": "shared"})]
        broken = [*instances.launch(data=invalid), *instances.launch(kind="m5.nonsense")]
        # A node that registers shows that the earlier instances were evaluated.
        instances.node(instances.launch()[0])
        time.sleep(IDLE_SECONDS)
        for instance in [*foreign, *broken]:
            assert instances.of(instance["InstanceId"]) is None
        text = instances.kubelets.log.read_text()
        for instance in broken:
            assert len(re.findall(f"{instance['InstanceId']}.* never becomes a Node", text)) == 1, text

    def test_killed_kubelets_continue_from_the_existing_state(self, instances):
        stays, ends = instances.launch(2)
        for instance in (stays, ends):
            instances.node(instance)
        before = instances.of(stays["InstanceId"])["metadata"]["uid"]
        os.kill(instances.kubelets.pid, signal.SIGKILL)
        instances.moto.terminate(ends["InstanceId"])
        starts = instances.launch()[0]
        time.sleep(IDLE_SECONDS)
        assert instances.of(ends["InstanceId"]) is not None, "something else deleted the Node"
        instances.kubelets.up()
        instances.node(starts)
        instances.wait_deleted(ends["InstanceId"])
        assert instances.of(stays["InstanceId"])["metadata"]["uid"] == before

    def test_a_deleted_node_is_not_registered_again(self, instances):
        instance = instances.launch()[0]
        node = instances.node(instance)
        instances.plane.api.delete("Node", node["metadata"]["name"])
        instances.wait_deleted(instance["InstanceId"])
        time.sleep(IDLE_SECONDS)
        assert instances.of(instance["InstanceId"]) is None

    def test_a_hundred_instances_boot_concurrently(self, instances):
        begin = time.monotonic()
        ids = [instance["InstanceId"] for instance in instances.launch(100)]
        ready = lambda: sum(bool((node := instances.of(id)) and is_true(node, "Ready")) for id in ids)
        instances.mirror.wait(lambda: ready() == 100, 60, "a hundred nodes ready", ready)
        print(f"\n100 nodes ready after {time.monotonic() - begin:.1f} s", flush=True)


@pytest.fixture
def kubelets(moto):
    """Kubelets in a control plane of their own, not started yet."""
    with harness.ControlPlane() as plane:
        made = harness.Kubelets(plane, moto.endpoint, cluster="demo")
        yield made
        made.down()


class TestLifeCycle:
    """The command itself."""

    def processes(self, kubelets):
        """Ids of the kubelets' processes in their control plane."""
        done = harness.run("pgrep", "-f", f"kubelets play {kubelets.plane.dir} ", check=False)
        return done.stdout.split()

    def test_a_second_up_is_refused_and_down_is_idempotent_and_complete(self, kubelets):
        kubelets.up()
        again = kubelets.up(check=False)
        assert again.returncode == 1
        assert "running in" in again.stderr
        assert "kubelets down" in again.stderr
        assert self.processes(kubelets) == [str(kubelets.pid)]
        kubelets.down()
        kubelets.down()
        assert self.processes(kubelets) == []
        kubelets.up()
        kubelets.plane.script("down", kubelets.plane.dir)
        wait_until(lambda: not self.processes(kubelets), 20, "the kubelets of a stopped control plane ended")
        without = kubelets.up(check=False)
        assert "no running control plane" in without.stderr

    def test_an_unreachable_endpoint_is_reported_and_an_outage_deletes_no_node(self, kubelets, moto, account):
        refused = kubelets.up("http://127.0.0.1:1", check=False)
        assert refused.returncode == 1
        assert "http://127.0.0.1:1" in refused.stderr
        assert "Could not connect" in refused.stderr
        assert self.processes(kubelets) == []
        assert "Invalid endpoint" in kubelets.up("127.0.0.1", check=False).stderr

        kubelets.up()
        moto.launch(account, **{"kubernetes.io/cluster/other": "owned"})
        wanted = moto.launch(account)[0]["PrivateDnsName"]
        nodes = lambda: [node["metadata"]["name"] for node in kubelets.plane.api.list(kube.NODES)]
        wait_until(nodes, 20, "the Node")
        moto.stop()
        wait_until(lambda: "retrying" in kubelets.log.read_text(), 40, "the outage logged")
        time.sleep(IDLE_SECONDS)
        assert nodes() == [wanted]
        assert kubelets.log.read_text().count("retrying") == 1
        assert len(self.processes(kubelets)) == 1
