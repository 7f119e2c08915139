"""What happens in a cluster, by watches: a mirror of its objects, and a record of which pod was planned where, when it was bound, and when
its node was launched. Nothing here polls, so short-lived states are not missed.
"""

import collections
import contextlib
import logging
import threading
import time
import types

from kubernetes.informer import ADDED, DELETED, MODIFIED, SharedInformer

from kube import CLAIMS, NODE_GROUP, NODES, PODS, being_disrupted, bound_to, condition, deleted_at, epoch, is_true, key, owned_by, parsed, planned_pods, reserved_until, terminating
from waiting import WaitTimeout, timeout_message

SYNC_TIMEOUT = 30.0  # seconds until every kind has been listed
WATCH_SECONDS = 60  # a watch ends after this time and resumes; bounds the time to stop an informer


class Source:
    """List and watch of one kind, for SharedInformer. `synced` is set when every listed object has been handled."""

    def __init__(self, api, kind):
        self.resource = api.resource(kind)
        self.synced = threading.Event()

    def list_or_watch(self, watch=False, resource_version=None, **_):
        """Lists, or opens a watch. The client reads the type from this docstring; without one, a watch that ends does not resume where it
        ended, but at its beginning.

        :rtype: object
        """
        if watch:
            self.synced.set()
            return self.resource.get(watch=True, resource_version=resource_version, timeout_seconds=WATCH_SECONDS, serialize=False)
        answer = parsed(self.resource.get(serialize=False))
        return types.SimpleNamespace(
            items=answer["items"],
            metadata=types.SimpleNamespace(resource_version=answer["metadata"]["resourceVersion"]),
        )


class Mirror:
    """Current Pods, Nodes and NodeClaims, and the record of their history, as a context manager."""

    KINDS = (CLAIMS, NODES, PODS)

    def __init__(self, api):
        self.changed = threading.Condition(threading.RLock())
        self.objects = {kind: {} for kind in {*self.KINDS, PODS, NODES, CLAIMS}}
        self.record = Record()
        self.failure = None  # of an event handler; the informer would only log it
        self.listeners = []  # called without arguments after every event, with the lock held
        self.sources = {kind: Source(api, kind) for kind in self.KINDS}
        self.informers = []
        for kind, source in self.sources.items():
            informer = SharedInformer(source.list_or_watch)
            for event in (ADDED, MODIFIED, DELETED):
                informer.add_event_handler(event, lambda item, kind=kind, event=event: self.on_event(kind, event, item))
            self.informers.append(informer)

    def __enter__(self):
        # A watch that ends is resumed; the informer logs each end with a stack trace.
        logging.getLogger("kubernetes.informer").setLevel(logging.CRITICAL)
        for informer in self.informers:
            informer.start()
        for kind, source in self.sources.items():
            if not source.synced.wait(SYNC_TIMEOUT):
                raise WaitTimeout(f"{kind} objects were not listed within {SYNC_TIMEOUT:.0f} s")
        return self

    def __exit__(self, *_):
        for informer in self.informers:
            informer.stop()

    def on_event(self, kind, event, item):
        with self.changed:
            try:
                self.update(kind, event, item)
            except Exception as error:
                self.failure = error
                raise
            finally:
                self.changed.notify_all()

    def update(self, kind, event, item):
        if event == DELETED:
            self.objects[kind].pop(key(item), None)
        else:
            self.objects[kind][key(item)] = item
        self.record.on_event(kind, event, item, time.monotonic())
        for listener in self.listeners:
            listener()

    def wait(self, predicate, timeout, what, last=None):
        """Waits until `predicate()` is true and returns its value. `last()` describes the state for the failure message."""
        deadline = time.monotonic() + timeout
        while True:
            with self.changed:
                if self.failure:
                    raise self.failure
                if result := predicate():
                    return result
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeout(timeout_message(what, timeout, last or self.summary))
                self.changed.wait(min(left, 0.5))
            # A burst is thousands of events: evaluating the predicate for each would take CPU time from the service under test.
            time.sleep(0.05)

    def ended(self, namespace):
        """What is known of the pods of a namespace that are gone."""
        with self.changed:
            there = {pod["metadata"]["uid"] for pod in self.objects[PODS].values()}
            gone = [uid for uid, name in self.record.pod_keys.items() if name.startswith(f"{namespace}/") and uid not in there]
            return [self.record.end_of(uid) for uid in gone]

    @contextlib.contextmanager
    def sampling(self, measure):
        """Collects the value of `measure()` after every event; yields the list."""
        samples = []
        listener = lambda: samples.append(measure())
        with self.changed:
            self.listeners.append(listener)
        try:
            yield samples
        finally:
            with self.changed:
                self.listeners.remove(listener)

    def pods(self, namespace=None, daemons=False):
        """Pods that have not completed, without those of DaemonSets unless requested."""
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

    def own_nodes(self):
        """The Nodes without those of managed node groups."""
        return [node for node in self.nodes() if NODE_GROUP not in node["metadata"].get("labels", {})]

    def claims(self):
        with self.changed:
            return list(self.objects[CLAIMS].values())

    def node_of(self, claim):
        """The Node of a NodeClaim, or None."""
        provider = claim.get("status", {}).get("providerID")
        return next((node for node in self.nodes() if provider and node["spec"].get("providerID") == provider), None)

    def node_of_instance(self, id):
        """The Node of an instance, or None."""
        return next((node for node in self.nodes() if node["spec"].get("providerID", "").endswith(f"/{id}")), None)

    def pending(self, namespace=None):
        return [pod for pod in self.pods(namespace) if not bound_to(pod)]

    def all_bound(self, count=None, namespace=None):
        """Whether there are `count` pods and all of them are bound to Nodes that exist, none of them terminating."""
        pods, nodes = self.pods(namespace), {key(node) for node in self.nodes()}
        return (count is None or len(pods) == count) and all(bound_to(pod) in nodes and not terminating(pod) for pod in pods)

    def settled(self):
        """Whether every NodeClaim is initialized and has its Node, and every Node outside managed node groups has its NodeClaim."""
        claims = self.claims()
        ready = all(is_true(claim, "Initialized") and not terminating(claim) and self.node_of(claim) for claim in claims)
        return ready and len(claims) == len(self.own_nodes())

    def summary(self, namespace=None):
        """One line on pods, NodeClaims and Nodes, for failure messages."""
        pods, claims = self.pods(namespace), self.claims()
        pending = self.pending(namespace)
        reasons = collections.Counter(condition(pod, "PodScheduled").get("message", "not scheduled yet")[:160] for pod in pending)
        launched = sum(is_true(claim, "Launched") for claim in claims)
        text = f"{len(pods)} pods, {len(pods) - len(pending)} bound, {len(claims)} NodeClaims, {launched} launched, {len(self.nodes())} Nodes"
        for reason, count in reasons.most_common(3):
            text += f"; {count} pending: {reason}"
        if pending:
            text += f" (such as {key(pending[0])})"
        return text


class NodeMirror(Mirror):
    """A mirror of a cluster without the CRD of NodeClaims."""

    KINDS = (NODES, PODS)


class Record:
    """The history of each pod. Times are of the monotonic clock, in seconds, as the watch showed them."""

    def __init__(self):
        self.pod_keys = {}  # uid -> namespace/name
        self.created = {}  # uid -> first seen
        self.rejected = {}  # uid -> first seen unschedulable
        self.bound = {}  # uid -> (time, Node, NodeClaim that it was planned on at that time)
        self.never_planned = set()  # uid of pods that were bound before a NodeClaim named them
        self.left = {}  # uid -> first seen terminating
        self.evicted = {}  # uid -> requested to terminate: by the API server's clock, which no late watch shifts
        self.runs_on = {}  # namespace/name -> Node of the pod
        self.plans = collections.defaultdict(list)  # namespace/name -> NodeClaims that listed it, in order
        self.launched = {}  # NodeClaim -> first seen launched
        self.initialized = {}  # NodeClaim -> first seen initialized
        self.initialized_at = {}  # NodeClaim -> time of this condition, by the clock of the service
        self.deleted = {}  # NodeClaim -> first seen terminating or deleted
        self.provider = {}  # NodeClaim -> provider id
        self.node_name = {}  # provider id -> Node
        self.ready = {}  # Node -> first seen ready
        self.active = {}  # NodeClaim -> (end of its reservations, planned pods), until it is disrupted or terminates
        # (pod, NodeClaim, other NodeClaim): capacity reserved for one pod on two nodes at once. Room for the successor of a pod that runs, on
        # another node than the pod's, is no second reservation.
        self.doubly_planned = []
        self.claims_created = 0

    def end_of(self, uid):
        """A line about a pod that is gone."""
        bound, node, planned = self.bound.get(uid, (None, None, None))
        times = {"bound": bound, "terminating": self.left.get(uid)}
        times = ", ".join(f"{what} after {time - self.created[uid]:.1f} s" for what, time in times.items() if time)
        return f"{self.pod_keys[uid]} is gone: on {node}, planned on {planned}, {times}"

    def on_event(self, kind, event, item, now):
        if kind == PODS:
            self.on_pod(item, now)
        elif kind == CLAIMS:
            self.on_claim(event, item, now)
        elif kind == NODES and "providerID" in item["spec"]:
            self.node_name[item["spec"]["providerID"]] = item["metadata"]["name"]
            if is_true(item, "Ready"):
                self.ready.setdefault(item["metadata"]["name"], now)

    def on_pod(self, pod, now):
        if owned_by(pod, "DaemonSet"):
            return
        uid, name = pod["metadata"]["uid"], key(pod)
        self.pod_keys[uid] = name
        self.created.setdefault(uid, now)
        scheduled = condition(pod, "PodScheduled")
        if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
            self.rejected.setdefault(uid, now)
        if terminating(pod):
            self.left.setdefault(uid, now)
            self.evicted.setdefault(uid, deleted_at(pod))
        if bound_to(pod):
            self.runs_on[name] = bound_to(pod)
        if bound_to(pod) and uid not in self.bound:
            plans = [claim for claim in self.plans[name] if claim in self.active]
            self.bound[uid] = (now, bound_to(pod), plans[-1] if plans else None)
            if not self.plans[name]:
                self.never_planned.add(uid)

    def on_claim(self, event, claim, now):
        name = claim["metadata"]["name"]
        if event == ADDED:
            self.claims_created += 1
        provider = claim.get("status", {}).get("providerID")
        if provider:
            self.provider[name] = provider
        if is_true(claim, "Launched"):
            self.launched.setdefault(name, now)
        if is_true(claim, "Initialized"):
            self.initialized.setdefault(name, now)
            self.initialized_at.setdefault(name, epoch(condition(claim, "Initialized")["lastTransitionTime"]))
        if event == DELETED or terminating(claim):
            self.active.pop(name, None)
            self.deleted.setdefault(name, now)
            return
        if being_disrupted(claim):
            # Its instance ends: the pods that it was planned for get other nodes.
            self.active.pop(name, None)
            return
        planned = planned_pods(claim)
        for pod in planned:
            if name not in self.plans[pod]:
                self.plans[pod].append(name)
                others = (other for other, (until, pods) in self.active.items() if other != name and pod in pods and until > time.time())
                runs_on = self.runs_on.get(pod)
                self.doubly_planned.extend((pod, other, name) for other in others if not runs_on or self.node_of(other) != runs_on)
        self.active[name] = (reserved_until(claim), set(planned))

    def node_of(self, claim):
        return self.node_name.get(self.provider.get(claim))

    def followed(self, uids=None):
        """How far kube-scheduler followed the plan, for the bound pods (of `uids`): the number of pods that no NodeClaim had named, because
        existing nodes had room; the number bound to their planned node; and the others as (pod, node, planned node)."""
        unplanned, followed, strays = 0, 0, []
        for uid, (_, node, claim) in self.bound.items():
            if uids is not None and uid not in uids:
                continue
            if uid in self.never_planned:
                unplanned += 1
            elif self.node_of(claim) == node:
                followed += 1
            else:
                strays.append((self.pod_keys[uid], node, self.node_of(claim)))
        return unplanned, followed, strays

    def without_successor(self, claim, pods):
        """Of the `pods` that ran on this NodeClaim's node: those without another initialized NodeClaim at the time of its deletion."""
        out = []
        for pod in pods:
            others = [other for other in self.plans[pod] if other != claim]
            if not any(self.initialized.get(other, float("inf")) <= self.deleted[claim] for other in others):
                out.append(pod)
        return out

    def detect_to_launch(self, uids=None):
        """For each pod that was rejected before a NodeClaim was launched for it: seconds until then, sorted."""
        return self.until_launch(self.rejected, self.launched, uids)

    def until_launch(self, since, launches, uids=None):
        """For each pod of `since` (time by uid): seconds until the first launch of a NodeClaim that was planned for it, sorted; `launches` has the time
        of each NodeClaim. Pods that the first launch was before are left out: a later one is for another node."""
        out = []
        for uid, begin in since.items():
            if uids is not None and uid not in uids:
                continue
            first = min((launches[claim] for claim in self.plans[self.pod_keys[uid]] if claim in launches), default=begin)
            if first > begin:
                out.append(first - begin)
        return sorted(out)

    def ready_to_bound(self, uids):
        """Seconds from the time at which the last node of these pods was ready until the last of them was bound."""
        bound = [self.bound[uid] for uid in uids]
        return max(at for at, _, _ in bound) - max(self.ready[node] for _, node, _ in bound)


def percentile(values, share):
    """The least value that `share` percent of the sorted values do not exceed; None for no values."""
    return values[min(len(values) - 1, max(0, -(-len(values) * share // 100) - 1))] if values else None
