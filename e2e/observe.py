"""Seeing what happens in a cluster: a client of the API server, a mirror of objects kept by watches, and a record of which pod was
planned where, when it was bound, and when its node was launched.

Everything is told by watch events, so nothing here polls, and what was true only for a moment is not missed.
"""

import collections
import contextlib
import datetime
import http.client
import json
import pathlib
import socket
import ssl
import threading
import time
import urllib.parse

PODS = "/api/v1/pods"
NODES = "/api/v1/nodes"
CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
POOLS = "/apis/karpenter.sh/v1/nodepools"
CLASSES = "/apis/karpenter.k8s.aws/v1/ec2nodeclasses"
EVENTS = "/apis/events.k8s.io/v1/events"

PLANNED_PODS = "stowage.dev/planned-pods"
HOLD_UNTIL = "stowage.dev/hold-until"
PLANNED_OFFERING = "stowage.dev/planned-offering"
DISRUPTED_TAINT = "karpenter.sh/disrupted"
CAPACITY_TYPE = "karpenter.sh/capacity-type"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
GONE = (http.client.RemoteDisconnected, http.client.CannotSendRequest, ssl.SSLEOFError, ssl.SSLZeroReturnError, BrokenPipeError, ConnectionResetError)


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, status, message):
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class Timeout(AssertionError):
    """Something did not come about in time."""


class Api:
    """A client of one control plane's API server, as the administrator. Threads may share it: each has a connection of its own."""

    def __init__(self, directory):
        directory = pathlib.Path(directory)
        self.url = urllib.parse.urlsplit(json.loads((directory / "state.json").read_text())["api"])
        self.tls = ssl.create_default_context(cafile=directory / "pki" / "ca.crt")
        self.tls.load_cert_chain(directory / "pki" / "admin.crt", directory / "pki" / "admin.key")
        self.local = threading.local()
        self.kept = []

    def close(self):
        """Closes every thread's connection."""
        for connection in self.kept:
            connection.close()

    def connect(self, timeout=30):
        return http.client.HTTPSConnection(self.url.hostname, self.url.port, timeout=timeout, context=self.tls)

    def request(self, method, path, body=None, content_type="application/json"):
        """The answer as an object. Raises ApiError for a status of 400 and above."""
        return self.send(method, path, None if body is None else json.dumps(body), content_type)

    def send(self, method, path, content, content_type):
        """`request`, with the body as text."""
        headers = {"Accept": "application/json", **({"Content-Type": content_type} if content else {})}
        while True:
            known = getattr(self.local, "connection", None)
            connection = known or self.connect()
            if known is None:
                self.local.connection = connection
                self.kept.append(connection)
            try:
                connection.request(method, path, content, headers)
                response = connection.getresponse()
                data = response.read()
                break
            except GONE:
                connection.close()
                self.kept.remove(connection)
                self.local.connection = None
                # A kept connection may have been closed at the other end meanwhile; a new one that breaks is news.
                if known is None:
                    raise
        answer = json.loads(data) if data else {}
        if response.status >= 400:
            raise ApiError(response.status, answer.get("message", data.decode(errors="replace")))
        return answer

    def get(self, path):
        return self.request("GET", path)

    def items(self, path):
        return self.get(path).get("items", [])

    def find(self, path):
        """An object, or None."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def create(self, path, body):
        return self.request("POST", path, body)

    def apply(self, item):
        """Server-side apply."""
        path = f"{path_of(item)}?fieldManager=e2e&force=true&fieldValidation=Strict"
        return self.request("PATCH", path, item, "application/apply-patch+yaml")

    def patch(self, path, body):
        return self.request("PATCH", path, body, "application/merge-patch+json")

    def delete(self, path):
        with contextlib.suppress(ApiError):
            return self.request("DELETE", path)


# Plurals that are not the kind in lower case with an s.
PLURALS = {"EC2NodeClass": "ec2nodeclasses"}


def path_of(item):
    """Where an object is at the API server."""
    version, meta = item["apiVersion"], item["metadata"]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    space = f"/namespaces/{meta['namespace']}" if "namespace" in meta else ""
    return f"{base}{space}/{PLURALS.get(item['kind'], item['kind'].lower() + 's')}/{meta['name']}"


class Watch(threading.Thread):
    """Lists a collection, then follows it; calls `tell(path, kind, object)` with kind ADDED, MODIFIED or DELETED, until stopped.
    After a break it lists again and tells what is different."""

    def __init__(self, api, path, tell):
        super().__init__(daemon=True, name=f"watch {path}")
        self.api, self.path, self.tell = api, path, tell
        self.known = {}
        self.stopping = False
        self.connection = None
        self.listed = threading.Event()

    def run(self):
        while not self.stopping:
            try:
                self.follow(self.list())
            except (OSError, http.client.HTTPException, ApiError, ValueError, AttributeError):
                # The server went away or this watch was stopped (a closed response has no file any more): begin again, or end.
                time.sleep(0.1)

    def list(self):
        answer = self.api.get(self.path)
        found = {item["metadata"]["uid"]: item for item in answer.get("items", [])}
        for uid in [uid for uid in self.known if uid not in found]:
            self.tell(self.path, "DELETED", self.known.pop(uid))
        for uid, item in found.items():
            before = self.known.get(uid)
            if before is None or before["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self.known[uid] = item
                self.tell(self.path, "ADDED" if before is None else "MODIFIED", item)
        self.listed.set()
        return answer["metadata"]["resourceVersion"]

    def follow(self, version):
        self.connection = self.api.connect(timeout=None)
        with contextlib.closing(self.connection):
            self.connection.request("GET", f"{self.path}?watch=1&resourceVersion={version}&timeoutSeconds=3000", headers={"Accept": "application/json"})
            response = self.connection.getresponse()
            if response.status != 200:
                raise ApiError(response.status, response.read().decode(errors="replace"))
            while not self.stopping and (line := response.readline()):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                item = event["object"]
                if event["type"] == "DELETED":
                    self.known.pop(item["metadata"]["uid"], None)
                else:
                    self.known[item["metadata"]["uid"]] = item
                self.tell(self.path, event["type"], item)

    def stop(self):
        self.stopping = True
        connection = self.connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def key(item):
    meta = item["metadata"]
    return f"{meta['namespace']}/{meta['name']}" if "namespace" in meta else meta["name"]


def condition(item, kind):
    """The condition of this type, or an empty one."""
    found = (entry for entry in item.get("status", {}).get("conditions") or [] if entry["type"] == kind)
    return next(found, {})


def holds(item, kind):
    return condition(item, kind).get("status") == "True"


def owned_by(item, kind):
    return any(owner["kind"] == kind for owner in item["metadata"].get("ownerReferences", []))


def bound_to(pod):
    return pod.get("spec", {}).get("nodeName")


def leaving(item):
    return "deletionTimestamp" in item["metadata"]


def tainted(node, taint):
    return any(entry["key"] == taint for entry in node["spec"].get("taints", []))


def planned_pods(claim):
    return json.loads(claim["metadata"].get("annotations", {}).get(PLANNED_PODS) or "[]")


def held_until(claim):
    """When the NodeClaim's room for its planned pods ends, in seconds since the epoch."""
    text = claim["metadata"].get("annotations", {}).get(HOLD_UNTIL, "1970-01-01T00:00:00Z")
    return datetime.datetime.fromisoformat(text).timestamp()


class Mirror:
    """Pods, Nodes and NodeClaims as they are now, and the record of what became of them."""

    def __init__(self, api):
        self.api = api
        self.changed = threading.Condition(threading.RLock())
        self.objects = {PODS: {}, NODES: {}, CLAIMS: {}}
        self.record = Record()
        self.listeners = []  # Called without arguments after every event, with the lock held: sees what lasts no longer than one event.
        self.watches = [Watch(api, path, self.tell) for path in (CLAIMS, NODES, PODS)]

    def __enter__(self):
        for watch in self.watches:
            watch.start()
        for watch in self.watches:
            if not watch.listed.wait(30):
                raise Timeout(f"{watch.path} could not be listed within 30 s")
        return self

    def __exit__(self, *_):
        for watch in self.watches:
            watch.stop()
        for watch in self.watches:
            watch.join(5)

    def tell(self, path, kind, item):
        with self.changed:
            if kind == "DELETED":
                self.objects[path].pop(key(item), None)
            else:
                self.objects[path][key(item)] = item
            self.record.see(path, kind, item, time.monotonic())
            for listener in self.listeners:
                listener()
            self.changed.notify_all()

    def wait(self, predicate, timeout, what, last=None):
        """Waits until `predicate()` is true and returns what it returned. `last()` says, when time is up, what there was instead."""
        deadline = time.monotonic() + timeout
        while True:
            with self.changed:
                if result := predicate():
                    return result
                left = deadline - time.monotonic()
                if left <= 0:
                    seen = last() if last else self.summary()
                    raise Timeout(f"{what}: not within {timeout:.0f} s; last seen: {seen}")
                self.changed.wait(min(left, 0.5))
            # A burst is thousands of events: looking after each would take the core that the service is to run on.
            time.sleep(0.05)

    @contextlib.contextmanager
    def watching(self, measure):
        """Collects what `measure()` says after every event; yields the list."""
        seen = []
        listener = lambda: seen.append(measure())
        with self.changed:
            self.listeners.append(listener)
        try:
            yield seen
        finally:
            with self.changed:
                self.listeners.remove(listener)

    def pods(self, namespace=None, daemons=False):
        """Pods that are not finished, without those of DaemonSets unless asked for."""
        with self.changed:
            found = list(self.objects[PODS].values())
        return [
            pod
            for pod in found
            if (namespace is None or pod["metadata"]["namespace"] == namespace)
            and pod["status"].get("phase") not in ("Succeeded", "Failed")
            and (daemons or not owned_by(pod, "DaemonSet"))
        ]

    def nodes(self):
        with self.changed:
            return list(self.objects[NODES].values())

    def claims(self):
        with self.changed:
            return list(self.objects[CLAIMS].values())

    def node_of(self, claim):
        """The Node of a NodeClaim, or None."""
        provider = claim.get("status", {}).get("providerID")
        return next((node for node in self.nodes() if provider and node["spec"].get("providerID") == provider), None)

    def pending(self, namespace=None):
        return [pod for pod in self.pods(namespace) if not bound_to(pod)]

    def all_bound(self, count=None, namespace=None):
        """Whether there are `count` pods and all of them are bound, none on its way out."""
        pods = self.pods(namespace)
        return (count is None or len(pods) == count) and all(bound_to(pod) and not leaving(pod) for pod in pods)

    def settled(self):
        """Whether every NodeClaim is initialized and has its Node, and every Node of Karpenter's kind its NodeClaim."""
        claims = self.claims()
        ready = all(holds(claim, "Initialized") and not leaving(claim) and self.node_of(claim) for claim in claims)
        return ready and len(claims) == len(self.nodes())

    def summary(self, namespace=None):
        pods, claims = self.pods(namespace), self.claims()
        pending = self.pending(namespace)
        reasons = collections.Counter(condition(pod, "PodScheduled").get("message", "not tried yet")[:160] for pod in pending)
        launched = sum(holds(claim, "Launched") for claim in claims)
        text = f"{len(pods)} pods, {len(pods) - len(pending)} bound, {len(claims)} NodeClaims, {launched} launched, {len(self.nodes())} Nodes"
        for reason, count in reasons.most_common(3):
            text += f"; {count} pending: {reason}"
        if pending:
            text += f" (such as {key(pending[0])})"
        return text


class Record:
    """What became of each pod. Times are of the monotonic clock, in seconds, as the watch showed it."""

    def __init__(self):
        self.pod_keys = {}  # uid -> namespace/name
        self.rejected = {}  # uid -> first seen unschedulable
        self.bound = {}  # uid -> (time, Node, NodeClaim it was planned on then)
        self.plans = collections.defaultdict(list)  # namespace/name -> NodeClaims that listed it, in order
        self.launched = {}  # NodeClaim -> first seen launched
        self.initialized = {}  # NodeClaim -> first seen initialized
        self.left = {}  # NodeClaim -> first seen on its way out
        self.provider = {}  # NodeClaim -> provider id
        self.node_name = {}  # provider id -> Node
        self.alive = {}  # NodeClaim -> (end of its holds, planned pods), while it is not on its way out
        self.twice = []  # (pod, NodeClaim, other NodeClaim): room bought for one pod on two nodes at a time
        self.claims_made = 0

    def see(self, path, kind, item, now):
        if path == PODS:
            self.see_pod(kind, item, now)
        elif path == CLAIMS:
            self.see_claim(kind, item, now)
        elif "providerID" in item["spec"]:
            self.node_name[item["spec"]["providerID"]] = item["metadata"]["name"]

    def see_pod(self, kind, pod, now):
        if owned_by(pod, "DaemonSet"):
            return
        uid, name = pod["metadata"]["uid"], key(pod)
        self.pod_keys[uid] = name
        scheduled = condition(pod, "PodScheduled")
        if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
            self.rejected.setdefault(uid, now)
        if bound_to(pod) and uid not in self.bound:
            plans = [claim for claim in self.plans[name] if claim in self.alive]
            self.bound[uid] = (now, bound_to(pod), plans[-1] if plans else None)

    def see_claim(self, kind, claim, now):
        name = claim["metadata"]["name"]
        if kind == "ADDED":
            self.claims_made += 1
        provider = claim.get("status", {}).get("providerID")
        if provider:
            self.provider[name] = provider
        if holds(claim, "Launched"):
            self.launched.setdefault(name, now)
        if holds(claim, "Initialized"):
            self.initialized.setdefault(name, now)
        if kind == "DELETED" or leaving(claim):
            self.alive.pop(name, None)
            self.left.setdefault(name, now)
            return
        planned = planned_pods(claim)
        for pod in planned:
            if name not in self.plans[pod]:
                self.plans[pod].append(name)
                others = (other for other, (until, pods) in self.alive.items() if other != name and pod in pods and until > time.time())
                self.twice.extend((pod, other, name) for other in others)
        self.alive[name] = (held_until(claim), set(planned))

    def node_of(self, claim):
        return self.node_name.get(self.provider.get(claim))

    def followed(self, uids=None):
        """Of the bound pods (those of `uids`): how many no node was ever planned for, since there was room when they came; how many
        went to the node planned for them; and the others as (pod, node, planned node)."""
        unplanned, followed, strays = 0, 0, []
        for uid, (_, node, claim) in self.bound.items():
            if uids is not None and uid not in uids:
                continue
            if claim is None and uid not in self.rejected:
                unplanned += 1
            elif self.node_of(claim) == node:
                followed += 1
            else:
                strays.append((self.pod_keys[uid], node, self.node_of(claim)))
        return unplanned, followed, strays

    def homeless_at_departure(self, claim, pods):
        """Of the `pods` that were on this NodeClaim's node: those without a new place that was ready when the NodeClaim was deleted."""
        out = []
        for pod in pods:
            others = [other for other in self.plans[pod] if other != claim]
            if not any(self.initialized.get(other, float("inf")) <= self.left[claim] for other in others):
                out.append(pod)
        return out

    def detect_to_launch(self, uids=None):
        """For each pod that was rejected: seconds until the first NodeClaim made for it afterwards was launched, sorted."""
        out = []
        for uid, rejected in self.rejected.items():
            if uids is not None and uid not in uids:
                continue
            times = [self.launched[claim] for claim in self.plans[self.pod_keys[uid]] if claim in self.launched]
            later = [at - rejected for at in times if at >= rejected]
            if later:
                out.append(min(later))
        return sorted(out)


def percentile(values, share):
    """The least value that `share` of the sorted values do not exceed; None of none."""
    return values[min(len(values) - 1, max(0, -(-len(values) * share // 100) - 1))] if values else None
