"""The ValidatingAdmissionPolicies of the chart on a real API server: with the token of the ServiceAccount, each write that the service
makes is accepted, and every other write that RBAC would allow is refused."""

import base64
import contextlib
import json

import pytest

import harness
from chart_test import GENERATED, Cluster
from waiting import wait_until

MERGE, JSON = "application/merge-patch+json", "application/json-patch+json"
# The end of every message: what to do.
ADVICE = "if Stowage and its chart have different versions, upgrade both; otherwise the ServiceAccount is misused"
OURS = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}
FOREIGN = {"group": "eks.amazonaws.com", "kind": "NodeClass", "name": "default"}
PODS, NODES = "/api/v1/namespaces/default/pods", "/api/v1/nodes"
POOLS, CLAIMS, CLASSES = "/apis/karpenter.sh/v1/nodepools", "/apis/karpenter.sh/v1/nodeclaims", "/apis/karpenter.k8s.aws/v1/ec2nodeclasses"
CRDS = ["nodepools.karpenter.sh", "nodeclaims.karpenter.sh", "ec2nodeclasses.karpenter.k8s.aws"]
REQUIREMENTS = [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]
UNREGISTERED = {"key": "karpenter.sh/unregistered", "effect": "NoExecute"}
DISRUPTED = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
DEDICATED = {"key": "dedicated", "value": "x", "effect": "NoSchedule"}
PLANNED_TAINT = {"key": "stowage.dev/planned", "value": "uid", "effect": "NoSchedule"}
PLANNED = {"key": "stowage.dev/planned", "operator": "Equal", "value": "uid", "effect": "NoSchedule"}


def pool(name, reference):
    return {"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": name, "labels": {"l": "1"}}, "spec": {"limits": {"cpu": "10"}, "template": {"spec": {"nodeClassRef": reference, "requirements": REQUIREMENTS}}}}


def claim(name, reference):
    metadata = {"name": name, "labels": {"karpenter.sh/nodepool": "ours"}, "finalizers": ["karpenter.sh/termination"]}
    return {"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "metadata": metadata, "spec": {"nodeClassRef": reference, "requirements": REQUIREMENTS}}


def node_class():
    terms = {"subnetSelectorTerms": [{"tags": {"a": "b"}}], "securityGroupSelectorTerms": [{"tags": {"a": "b"}}], "amiSelectorTerms": [{"alias": "al2023@latest"}], "role": "r"}
    return {"apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": {"name": "default"}, "spec": terms}


def node(name, labels, taints=(), finalizers=()):
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}, "finalizers": list(finalizers)}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"providerID": f"aws:///z/{name}", "taints": list(taints)}}


def pod(name, **spec):
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default", "labels": {"app": "p"}}, "spec": {"containers": [{"name": "c", "image": "i"}], "tolerations": [{"key": "mine", "operator": "Exists"}], **spec}}


# The ReplicaSet of a pod that surges, and the pod's annotation after it left.
REPLICA_SET = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7d", "uid": "rs", "controller": True}
SURGED = {"stowage.dev/surged": '{"replica_set": "web-7d", "uid": "rs", "hash": "7d", "ready": 1}'}
LEAVES = {"metadata": {"labels": {"pod-template-hash": None}, "annotations": SURGED}}
RETURNS = {"metadata": {"labels": {"pod-template-hash": "7d"}, "annotations": {"stowage.dev/surged": None}, "ownerReferences": [REPLICA_SET]}}
NO_TOLERATIONS = "may add no tolerations with settings.placement=off"


def with_metadata(pod, **metadata):
    return pod | {"metadata": pod["metadata"] | metadata}


class Account:
    """Requests with the token of a ServiceAccount, which change nothing."""

    def __init__(self, cluster, account):
        config = cluster.dir / "account.kubeconfig"
        cluster.plane.service_account(account, config)
        access = json.loads(config.read_text())
        self.server, self.token = access["clusters"][0]["cluster"]["server"], access["users"][0]["user"]["token"]
        self.authority = cluster.dir / "account-ca.crt"
        self.authority.write_bytes(base64.b64decode(access["clusters"][0]["cluster"]["certificate-authority-data"]))
        self.http = harness.http()

    def refusal(self, method, path, body=None, kind="application/json"):
        """Why a request is refused; empty when it is accepted."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        data = None if body is None else json.dumps(body)
        answer = self.http.request(method, f"{self.server}{path}?dryRun=All", data=data, headers=headers, verify=str(self.authority), timeout=10)
        return "" if answer.ok else f"{answer.status_code} {answer.json()['message']}"

    def merge(self, path, body):
        return self.refusal("PATCH", path, body, MERGE)


@pytest.fixture(scope="class")
def cluster(control_plane):
    """The control plane with a release and objects of every kind that Stowage writes."""
    cluster = Cluster(control_plane)
    with cluster.undo:
        cluster.namespace("fenced")
        cluster.install("fenced", {**GENERATED, "settings.cloud": "ec2", "settings.clusterName": "prod", "replicas": 0})
        cluster.undo.callback(cluster.plane.delete_crds, CRDS)
        cluster.kubectl("wait", "--for=condition=Established", "crd", *CRDS)
        cluster.plane.has_service_account("default")
        for kind in ("NodePool", "NodeClaim", "Node"):
            cluster.undo.callback(cluster.plane.delete_with_finalizers, kind)
        for name in ("pending", "bound", "surges", "template", "surged"):
            cluster.undo.callback(cluster.api.delete, "Pod", name, "default", grace_seconds=0)
        objects = [
            *(make(name, reference) for make in (pool, claim) for name, reference in (("ours", OURS), ("foreign", FOREIGN))),
            node_class(),
            node("fresh", {}, [UNREGISTERED, DEDICATED]),
            node("open", {"karpenter.sh/nodepool": "ours", "karpenter.sh/registered": "true", "team": "a"}, [PLANNED_TAINT, DEDICATED], ["karpenter.sh/termination", "other.example/finalizer"]),
            node("master", {"karpenter.sh/nodepool": "ours", "node-role.kubernetes.io/control-plane": ""}),
            pod("pending", nodeSelector={"no": "node"}),
            pod("bound", nodeName="one"),
            with_metadata(pod("surges", nodeName="one"), labels={"app": "p", "pod-template-hash": "7d"}, annotations={"stowage.dev/surge": "true"}),
            with_metadata(pod("template", nodeName="one"), labels={"app": "p", "pod-template-hash": "7d"}),
            with_metadata(pod("surged", nodeName="one"), annotations={"stowage.dev/surge": "true", **SURGED}),
        ]
        # One after the other: the client discovers kinds that are new to it.
        for item in objects:
            cluster.create(item)
        yield cluster


@pytest.fixture(scope="class")
def account(cluster):
    return Account(cluster, "fenced/stowage")


class TestPolicies:
    """One control plane with objects of every kind; each test changes the mode of the release."""

    @staticmethod
    def mode(cluster, account, cloud, placement):
        """Installs a mode and waits until its rights and policies have taken effect."""
        cluster.install("fenced", {**GENERATED, "settings.cloud": cloud, "settings.clusterName": "prod", "settings.placement": placement, "replicas": 0}, command="upgrade")
        # Creating a marker Node is refused differently per cloud, and a toleration differently per placement.
        create = {"simulated": "may create only simulated Nodes", "ec2": "forbidden"}[cloud]
        wait_until(lambda: create in account.refusal("POST", NODES, node("marker", {})), 30, f"cloud {cloud} in effect")
        nominated = {"metadata": {}, "status": {"nominatedNodeName": "n", "phase": "Failed"}}
        status = {"nominate": "pod's status but nominatedNodeName", "extender": "pod's status but nominatedNodeName", "off": "forbidden"}[placement]
        wait_until(lambda: status in account.merge(f"{PODS}/pending/status", nominated), 30, f"placement {placement} in effect")
        toleration = [{"op": "add", "path": "/spec/tolerations/-", "value": PLANNED}]
        patched = lambda: account.refusal("PATCH", f"{PODS}/pending", toleration, JSON)
        wait_until(lambda: (NO_TOLERATIONS in patched()) == (placement == "off"), 30, f"placement {placement} in effect", patched)

    def test_the_expressions_type_check(self, cluster, subtests):
        def checked(name):
            status = cluster.api.get("ValidatingAdmissionPolicy", name).get("status", {})
            return status if status.get("observedGeneration") else None

        for name in ("pods", "nodes", "nodepools", "nodeclaims", "ec2nodeclasses"):
            with subtests.test(name):
                status = wait_until(lambda name=name: checked(f"stowage-{name}"), 30, "the policy checked")
                assert not status.get("typeChecking", {}).get("expressionWarnings"), status

    def test_every_write_of_the_service_is_accepted_and_no_other(self, cluster, account, subtests):
        self.mode(cluster, account, "ec2", "nominate")
        taints = lambda name: cluster.api.get("Node", name)["spec"].get("taints", [])
        others = lambda name, *keys: [taint for taint in taints(name) if taint["key"] not in keys]
        owner = {"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "name": "ours", "uid": "u", "blockOwnerDeletion": True}
        pending, bound, fresh, opened = f"{PODS}/pending", f"{PODS}/bound", f"{NODES}/fresh", f"{NODES}/open"
        sync = {"metadata": {"labels": {"karpenter.sh/nodepool": "ours", "team": "b"}, "annotations": {"a": "b"}, "finalizers": ["karpenter.sh/termination"], "ownerReferences": [owner]}, "spec": {"taints": [*taints("fresh"), {"key": "startup", "effect": "NoSchedule"}]}}
        hashes = {"karpenter.sh/nodepool-hash": "1", "karpenter.sh/nodepool-hash-version": "v3"}
        class_hashes = {"karpenter.k8s.aws/ec2nodeclass-hash": "1", "karpenter.k8s.aws/ec2nodeclass-hash-version": "v5"}
        for what, path, body in (
            ("nomination", f"{pending}/status", {"status": {"nominatedNodeName": "n"}}),
            ("a pod that leaves its ReplicaSet", f"{PODS}/surges", LEAVES),
            ("a pod that goes back", f"{PODS}/surged", RETURNS),
            ("registration", fresh, sync),
            ("opening", fresh, {"metadata": {"labels": {"karpenter.sh/registered": "true"}}, "spec": {"taints": [*others("fresh", "karpenter.sh/unregistered"), {"key": "stowage.dev/planned", "value": "u", "effect": "NoSchedule"}]}}),
            ("initialization", opened, {"metadata": {"labels": {"karpenter.sh/initialized": "true"}}}),
            ("removal of the planned taint", opened, {"spec": {"taints": others("open", "stowage.dev/planned")}}),
            ("disruption", opened, {"metadata": {"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": "karpenter"}}, "spec": {"taints": [*taints("open"), DISRUPTED]}}),
            ("end of a reservation", opened, {"metadata": {"labels": {"karpenter.sh/capacity-type": "on-demand", "karpenter.k8s.aws/capacity-reservation-id": None}}}),
            ("a retry of kube-scheduler", opened, {"metadata": {"annotations": {"stowage.dev/hold-released": "2026-01-01T00:00:00Z"}}}),
            ("release of a Node", opened, {"metadata": {"finalizers": ["other.example/finalizer"]}}),
            ("hash of a NodePool", f"{POOLS}/ours", {"metadata": {"annotations": hashes}}),
            ("status of a NodePool", f"{POOLS}/ours/status", {"status": {"resources": {"cpu": "1"}}}),
            ("plan of a NodeClaim", f"{CLAIMS}/ours", {"metadata": {"annotations": {"stowage.dev/planned-pods": "[]"}, "labels": {"topology.kubernetes.io/zone": "z"}}}),
            ("status of a NodeClaim", f"{CLAIMS}/ours/status", {"status": {"providerID": "aws:///z/i-1"}}),
            ("release of a NodeClaim", f"{CLAIMS}/ours", {"metadata": {"finalizers": []}}),
            ("hash and finalizer of a class", f"{CLASSES}/default", {"metadata": {"annotations": class_hashes, "finalizers": ["karpenter.k8s.aws/termination"]}}),
            ("status of a class", f"{CLASSES}/default/status", {"status": {"instanceProfile": "p"}}),
        ):
            with subtests.test(f"accepted: {what}"):
                assert account.merge(path, body) == ""
        with subtests.test("accepted: other methods"):
            toleration = [{"op": "test", "path": "/spec/tolerations/0/key", "value": "mine"}, {"op": "add", "path": "/spec/tolerations/-", "value": PLANNED}]
            assert account.refusal("PATCH", pending, toleration, JSON) == ""
            assert account.refusal("DELETE", bound) == ""
            assert account.refusal("DELETE", opened) == ""
            assert account.refusal("DELETE", fresh) == ""
            assert account.refusal("POST", CLAIMS, claim("new", OURS)) == ""
            assert account.refusal("DELETE", f"{CLAIMS}/ours") == ""

        status, node_labels = "nothing of a pod's status but nominatedNodeName", "only the labels of its own protocol"
        for what, path, body, why in (
            ("address of a pod", f"{pending}/status", {"status": {"podIPs": [{"ip": "10.0.0.1"}], "podIP": "10.0.0.1"}}, status),
            ("phase of a pod", f"{pending}/status", {"status": {"phase": "Running"}}, status),
            ("readiness of a pod", f"{pending}/status", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, status),
            ("labels by the status", f"{pending}/status", {"metadata": {"labels": {"app": "q"}}}, "metadata of a pod"),
            ("labels of a pod", pending, {"metadata": {"labels": {"app": "q"}}}, "metadata of a pod"),
            ("finalizers of a pod", pending, {"metadata": {"finalizers": ["a.example/b"]}}, "metadata of a pod"),
            ("owners of a pod", pending, {"metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "o", "uid": "u"}]}}, "metadata of a pod"),
            ("a pod leaves its ReplicaSet, but its owner did not ask for it", f"{PODS}/template", LEAVES, "metadata of a pod"),
            ("a pod leaves without the annotation", f"{PODS}/surges", {"metadata": {"labels": {"pod-template-hash": None}}}, "metadata of a pod"),
            ("a pod leaves with another label", f"{PODS}/surges", {"metadata": LEAVES["metadata"] | {"labels": {"pod-template-hash": None, "app": "q"}}}, "metadata of a pod"),
            ("a pod leaves with a deadline", f"{PODS}/surges", LEAVES | {"spec": {"activeDeadlineSeconds": 1}}, "nothing of a pod's spec but its tolerations"),
            ("a pod leaves for another ReplicaSet", f"{PODS}/surges", {"metadata": {"labels": {"pod-template-hash": "8e"}}}, "metadata of a pod"),
            ("a pod goes to a ReplicaSet that it did not leave", f"{PODS}/bound", RETURNS, "metadata of a pod"),
            ("a pod goes back to an owner of another kind", f"{PODS}/surged", {"metadata": RETURNS["metadata"] | {"ownerReferences": [REPLICA_SET | {"kind": "Job"}]}}, "metadata of a pod"),
            ("deadline of a pod", pending, {"spec": {"activeDeadlineSeconds": 1}}, "nothing of a pod's spec but its tolerations"),
            ("a toleration of a tenant's taint", pending, {"spec": {"tolerations": [*cluster.api.get("Pod", "pending", "default")["spec"]["tolerations"], {"key": "dedicated", "operator": "Exists"}]}}, "tolerations of stowage.dev/planned only"),
            ("a toleration of all planned taints", pending, {"spec": {"tolerations": [*cluster.api.get("Pod", "pending", "default")["spec"]["tolerations"], {"key": "stowage.dev/planned", "operator": "Exists"}]}}, "tolerations of stowage.dev/planned only"),
            ("labels of a control-plane node", f"{NODES}/master", {"metadata": {"labels": {"team": "x"}}}, "Nodes of the control plane"),
            ("taints of a control-plane node", f"{NODES}/master", {"spec": {"taints": [DISRUPTED]}}, "Nodes of the control plane"),
            ("a node turned into one of the control plane", fresh, {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}, "Nodes of the control plane"),
            ("a node of nobody", f"{NODES}/one", {"spec": {"taints": [DISRUPTED]}}, "--register-with-taints"),
            ("a node of nobody adopted", f"{NODES}/one", {"metadata": {"labels": {"karpenter.sh/nodepool": "ours"}}}, "--register-with-taints"),
            ("cordon", opened, {"spec": {"unschedulable": True}}, "nothing of a Node's spec but its taints"),
            ("a taint of others removed", opened, {"spec": {"taints": others("open", "dedicated")}}, "only taints that it manages"),
            ("a label after registration", opened, {"metadata": {"labels": {"team": "b"}}}, node_labels),
            ("a label removed after registration", opened, {"metadata": {"labels": {"karpenter.sh/registered": None}}}, node_labels),
            ("the host name", fresh, {"metadata": {"labels": {"kubernetes.io/hostname": "other"}}}, node_labels),
            ("an annotation after registration", opened, {"metadata": {"annotations": {"a": "b"}}}, "annotations of NodePools"),
            ("a finalizer of others", opened, {"metadata": {"finalizers": ["karpenter.sh/termination"]}}, "only the finalizer karpenter.sh/termination"),
            ("an owner of another kind", opened, {"metadata": {"ownerReferences": [owner | {"kind": "Pod", "apiVersion": "v1"}]}}, "only NodeClaims to the owners"),
            ("limits of a NodePool", f"{POOLS}/ours", {"spec": {"limits": {"cpu": "1000"}}}, "may not change the spec of a NodePool"),
            ("template of a NodePool", f"{POOLS}/ours", {"spec": {"template": {"metadata": {"labels": {"a": "b"}}}}}, "may not change the spec of a NodePool"),
            ("labels of a NodePool", f"{POOLS}/ours", {"metadata": {"labels": {"l": "2"}}}, "metadata but its hash annotations"),
            ("annotations of a NodePool", f"{POOLS}/ours", {"metadata": {"annotations": {"a": "b"}}}, "metadata but its hash annotations"),
            ("a foreign NodePool", f"{POOLS}/foreign", {"metadata": {"annotations": hashes}}, "nodeClassRef is an EC2NodeClass"),
            ("status of a foreign NodePool", f"{POOLS}/foreign/status", {"status": {"resources": {"cpu": "1"}}}, "nodeClassRef is an EC2NodeClass"),
            ("a foreign NodeClaim", f"{CLAIMS}/foreign", {"metadata": {"annotations": {"a": "b"}}}, "nodeClassRef is an EC2NodeClass"),
            ("status of a foreign NodeClaim", f"{CLAIMS}/foreign/status", {"status": {"providerID": "aws:///z/i-1"}}, "nodeClassRef is an EC2NodeClass"),
            ("a finalizer of others on a NodeClaim", f"{CLAIMS}/ours", {"metadata": {"finalizers": ["a.example/b"]}}, "only the finalizer karpenter.sh/termination"),
            ("user data of a class", f"{CLASSES}/default", {"spec": {"userData": "#!/bin/sh"}}, "may not change the spec of an EC2NodeClass"),
            ("annotations of a class", f"{CLASSES}/default", {"metadata": {"annotations": {"a": "b"}}}, "EC2NodeClass's metadata"),
        ):
            with subtests.test(f"refused: {what}"):
                refusal = account.merge(path, body)
                assert why in refusal and ADVICE in refusal, refusal
        with subtests.test("refused: image of a pod"):
            image = [{"op": "replace", "path": "/spec/containers/0/image", "value": "other"}]
            refusal = account.refusal("PATCH", pending, image, JSON)
            assert "nothing of a pod's spec but its tolerations" in refusal and ADVICE in refusal, refusal
        with subtests.test("refused: other methods"):
            for method, path, body, why in (
                ("DELETE", pending, None, "only pods that are bound"),
                ("DELETE", f"{NODES}/master", None, "Nodes of the control plane"),
                ("DELETE", f"{NODES}/one", None, "only Nodes with the label"),
                ("DELETE", f"{CLAIMS}/foreign", None, "nodeClassRef is an EC2NodeClass"),
                ("POST", CLAIMS, claim("new", FOREIGN), "nodeClassRef is an EC2NodeClass"),
            ):
                refusal = account.refusal(method, path, body)
                assert why in refusal and ADVICE in refusal, (method, path, refusal)
        with subtests.test("the policies restrict nobody else"):
            cluster.kubectl("label", "node", "open", "team=c", "--overwrite")
            cluster.kubectl("patch", "nodepool", "ours", "--type=merge", "-p", json.dumps({"spec": {"limits": {"cpu": "20"}}}))

    def test_simulated_ec2_writes_simulated_nodes_only(self, cluster, account, subtests):
        self.mode(cluster, account, "simulated", "nominate")
        simulated = node("sim", {"karpenter.sh/nodepool": "ours"}, [UNREGISTERED])
        simulated["metadata"]["annotations"] = {"kwok.x-k8s.io/node": "fake"}
        assert account.refusal("POST", NODES, simulated) == ""
        standalone = node("standalone", {}, [UNREGISTERED])
        standalone["metadata"]["annotations"] = simulated["metadata"]["annotations"]
        assert account.refusal("POST", NODES, standalone) == "", "of a NodeClaim without a NodePool"
        ready = {"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "r"}]}}
        assert account.merge(f"{NODES}/one/status", ready) == "" or "only Nodes with the label" in account.merge(f"{NODES}/one/status", ready)
        cluster.create(simulated)
        assert account.merge(f"{NODES}/sim/status", ready) == ""
        assert account.merge(f"{NODES}/sim", {"metadata": {"annotations": {"simulated.stowage.dev/event-error": "e"}}}) == ""
        for what, refusal, why in (
            ("a real node", account.refusal("POST", NODES, node("real", {"karpenter.sh/nodepool": "ours"}, [UNREGISTERED])), "only simulated Nodes"),
            ("an open node", account.refusal("POST", NODES, simulated | {"spec": {}}), "only simulated Nodes"),
            ("the status of a real node", account.merge(f"{NODES}/open/status", ready), "status of simulated Nodes only"),
            ("labels by the status", account.merge(f"{NODES}/sim/status", {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}), "Nodes of the control plane"),
        ):
            with subtests.test(what):
                assert why in refusal and ADVICE in refusal, refusal

    def test_other_placements_patch_no_more_of_pods(self, cluster, account):
        toleration = [{"op": "add", "path": "/spec/tolerations/-", "value": PLANNED}]
        nominated = {"status": {"nominatedNodeName": "n"}}
        self.mode(cluster, account, "ec2", "extender")
        assert account.merge(f"{PODS}/pending/status", nominated) == ""
        assert "nothing of a pod's status but" in account.merge(f"{PODS}/pending/status", {"status": {"phase": "Running"}})
        assert account.refusal("PATCH", f"{PODS}/pending", toleration, JSON) == ""
        other = [toleration[0] | {"value": PLANNED | {"key": "mine"}}]
        assert "tolerations of stowage.dev/planned only" in account.refusal("PATCH", f"{PODS}/pending", other, JSON)
        self.mode(cluster, account, "ec2", "off")
        assert account.merge(f"{PODS}/pending/status", nominated).startswith("403 pods \"pending\" is forbidden")
        # The policy alone, with the rights of another mode.
        with contextlib.ExitStack() as undo:
            role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "more"}, "rules": [{"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}]}
            cluster.create(role)
            undo.callback(cluster.kubectl, "delete", "clusterrole/more")
            cluster.kubectl("create", "clusterrolebinding", "more", "--clusterrole=more", "--serviceaccount=fenced:stowage")
            undo.callback(cluster.kubectl, "delete", "clusterrolebinding/more")
            refusal = lambda: account.merge(f"{PODS}/pending/status", nominated)
            wait_until(lambda: "nothing of a pod's status; " in refusal(), 30, "the right granted and the policy in effect", refusal)
            assert NO_TOLERATIONS in account.refusal("PATCH", f"{PODS}/pending", toleration, JSON)
