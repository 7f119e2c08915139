"""A client of one control plane's API server, on the dynamic client of the official Kubernetes package. Objects are plain dictionaries."""

import concurrent.futures
import datetime
import json
import pathlib
import threading

import kubernetes
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError, NotFoundError

from waiting import wait_until

PODS, NODES, CLAIMS = "Pod", "Node", "NodeClaim"
API_VERSIONS = {
    **dict.fromkeys(("Pod", "Node", "Namespace", "ServiceAccount", "Secret", "ConfigMap", "Service"), "v1"),
    **dict.fromkeys(("Deployment", "StatefulSet", "DaemonSet"), "apps/v1"),
    **dict.fromkeys(("NodePool", "NodeClaim"), "karpenter.sh/v1"),
    "Job": "batch/v1",
    "EC2NodeClass": "karpenter.k8s.aws/v1",
    "Event": "events.k8s.io/v1",
    "Lease": "coordination.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
    **dict.fromkeys(("MutatingWebhookConfiguration", "ValidatingAdmissionPolicy"), "admissionregistration.k8s.io/v1"),
    "Certificate": "cert-manager.io/v1",
    "ClusterRole": "rbac.authorization.k8s.io/v1",
}
FIELD_MANAGER = "e2e"
CONNECTIONS = 16  # kept open at once
CONCURRENT_APPLIES = 8
REQUEST_TIMEOUT = 30.0  # seconds
NAMESPACE_TIMEOUT = 60.0  # seconds until a terminating namespace is gone
EMPTY = {"metadata": {}}

PLANNED_PODS = "stowage.dev/planned-pods"
HOLD_UNTIL = "stowage.dev/hold-until"
PLANNED_OFFERING = "stowage.dev/planned-offering"
DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
DISRUPTING = "stowage.dev/disrupting"
DISRUPTED_TAINT = "karpenter.sh/disrupted"
PLANNED_TAINT = "stowage.dev/planned"
NODE_POOL = "karpenter.sh/nodepool"
NODE_GROUP = "eks.amazonaws.com/nodegroup"
CAPACITY_TYPE = "karpenter.sh/capacity-type"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"


class KubeApi:
    """A client with the rights of a kubeconfig. Threads may share it. Refusals raise subclasses of DynamicApiError."""

    def __init__(self, kubeconfig):
        kubeconfig = pathlib.Path(kubeconfig)
        configuration = kubernetes.client.Configuration(connection_pool_maxsize=CONNECTIONS)
        kubernetes.config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        self.client = kubernetes.client.ApiClient(configuration)
        # The client's discovery deletes its cache while it refreshes it: other threads fail on that.
        self.discovery = threading.Lock()
        # The default discovery cache is shared by all API servers that ever had this port.
        self.dynamic = DynamicClient(self.client, cache_file=str(kubeconfig.with_suffix(".discovery.json")))

    def close(self):
        self.client.rest_client.pool_manager.clear()

    def resource(self, kind):
        return self.discover(API_VERSIONS[kind], kind)

    def discover(self, version, kind):
        with self.discovery:
            return self.dynamic.resources.get(api_version=version, kind=kind)

    def version(self):
        """The version of the API server, such as v1.34.4."""
        return self.request("get", "/version")["gitVersion"]

    def request(self, method, path, body=None, **more):
        """A request by its path; the response as an object."""
        return parsed(self.dynamic.request(method, path, body=body, serialize=False, _request_timeout=REQUEST_TIMEOUT, **more))

    def list(self, kind, namespace=None):
        return parsed(self.resource(kind).get(namespace=namespace, serialize=False, _request_timeout=REQUEST_TIMEOUT))["items"]

    def get(self, kind, name, namespace=None):
        return parsed(self.resource(kind).get(name=name, namespace=namespace, serialize=False, _request_timeout=REQUEST_TIMEOUT))

    def find(self, kind, name, namespace=None):
        """An object, or None."""
        try:
            return self.get(kind, name, namespace)
        except NotFoundError:
            return None

    def create(self, item, dry_run=False):
        return self.write("create", item, dry_run="All" if dry_run else None)

    def replace(self, item):
        """Replaces an object, whatever its current version."""
        current = self.get(item["kind"], item["metadata"]["name"], item["metadata"].get("namespace"))
        version = {"resourceVersion": current["metadata"]["resourceVersion"]}
        return self.write("replace", {**item, "metadata": item["metadata"] | version})

    def apply(self, *items):
        """Applies objects server-side, concurrently, namespaces first. Unknown fields are refused."""
        namespaces = [item for item in items if item["kind"] == "Namespace"]
        others = [item for item in items if item["kind"] != "Namespace"]
        with concurrent.futures.ThreadPoolExecutor(CONCURRENT_APPLIES) as pool:
            for group in (namespaces, others):
                list(pool.map(self.apply_one, group))

    def apply_one(self, item):
        return self.write("server_side_apply", item, field_manager=FIELD_MANAGER, force_conflicts=True)

    def write(self, verb, item, **more):
        if item["kind"] == "Namespace":
            name = item["metadata"]["name"]
            wait_until(lambda: not terminating(self.find("Namespace", name) or EMPTY), NAMESPACE_TIMEOUT, f"the earlier namespace {name} deleted")
        resource = self.discover(item["apiVersion"], item["kind"])
        strict = [("fieldValidation", "Strict")]
        return parsed(getattr(resource, verb)(body=item, serialize=False, query_params=strict, _request_timeout=REQUEST_TIMEOUT, **more))

    def patch(self, kind, name, body, namespace=None):
        """A merge patch."""
        options = {"content_type": "application/merge-patch+json", "serialize": False, "_request_timeout": REQUEST_TIMEOUT}
        return parsed(self.resource(kind).patch(body=body, name=name, namespace=namespace, **options))

    def annotate(self, kind, name, annotations, namespace=None):
        """Sets annotations, or removes those of value None."""
        return self.patch(kind, name, {"metadata": {"annotations": annotations}}, namespace)

    def scale(self, kind, name, namespace, replicas):
        return self.patch(kind, name, {"spec": {"replicas": replicas}}, namespace)

    def scale_all(self, namespace, replicas):
        """Scales every Deployment and StatefulSet of a namespace."""
        for kind in ("Deployment", "StatefulSet"):
            for item in self.list(kind, namespace):
                self.scale(kind, item["metadata"]["name"], namespace, replicas)

    def delete(self, kind, name, namespace=None, uid=None, grace_seconds=None):
        """Deletes an object, unless it does not exist. With `uid`, only that very object."""
        options = {"preconditions": {"uid": uid}} if uid else {}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            self.resource(kind).delete(name=name, namespace=namespace, body=options, serialize=False, _request_timeout=REQUEST_TIMEOUT)
        except NotFoundError:
            pass

    def delete_all(self, kind, namespace=None, grace_seconds=None):
        """Deletes every object of a kind (in a namespace), without waiting for finalizers."""
        resource = self.resource(kind)
        options = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        namespaces = [namespace]
        if resource.namespaced and namespace is None:
            namespaces = sorted({item["metadata"]["namespace"] for item in self.list(kind)})
        for name in namespaces:
            self.request("delete", f"/{resource.path(namespace=name).lstrip('/')}", options)


def parsed(response):
    return json.loads(response.data)


def message(error):
    """What the API server says in a refusal."""
    assert isinstance(error, DynamicApiError)
    return json.loads(error.body).get("message", "")


# Predicates of objects


def key(item):
    """`namespace/name`, or the name of a cluster-scoped object."""
    metadata = item["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}" if "namespace" in metadata else metadata["name"]


def condition(item, kind):
    """The condition of this type, or an empty one."""
    conditions = item.get("status", {}).get("conditions") or []
    return next((entry for entry in conditions if entry["type"] == kind), {})


def is_true(item, kind):
    """Whether the condition of this type is True."""
    return condition(item, kind).get("status") == "True"


def owned_by(item, kind):
    return any(owner["kind"] == kind for owner in item["metadata"].get("ownerReferences", []))


def bound_to(pod):
    """The name of the node that a pod is bound to, or None."""
    return pod.get("spec", {}).get("nodeName")


def terminating(item):
    return "deletionTimestamp" in item["metadata"]


def epoch(text):
    """Seconds since the epoch of a time of the API, which has whole seconds."""
    return datetime.datetime.fromisoformat(text).timestamp()


def deleted_at(item):
    """When the deletion of an object was requested, by the API server's clock, in seconds since the epoch."""
    return epoch(item["metadata"]["deletionTimestamp"]) - item["metadata"].get("deletionGracePeriodSeconds", 0)


def annotations_of(item):
    return item["metadata"].get("annotations", {})


def being_disrupted(claim):
    """Whether a NodeClaim is deleted or chosen for disruption."""
    return terminating(claim) or DISRUPTING in annotations_of(claim)


def uses_up_budget(claim):
    """Whether a budget counts a NodeClaim: as in Karpenter, it does not count one whose instance shuts down."""
    return being_disrupted(claim) and not is_true(claim, "InstanceTerminating")


def pool_of(claim):
    """The name of a NodeClaim's NodePool."""
    return claim["metadata"]["labels"].get(NODE_POOL)


def taint_keys(node):
    return {taint["key"] for taint in node["spec"].get("taints", [])}


def planned_pods(claim):
    """Keys of the pods that a NodeClaim was planned for."""
    return json.loads(annotations_of(claim).get(PLANNED_PODS) or "[]")


def reserved_until(claim):
    """When the reservation for a NodeClaim's planned pods ends, in seconds since the epoch."""
    return epoch(annotations_of(claim).get(HOLD_UNTIL, "1970-01-01T00:00:00Z"))
