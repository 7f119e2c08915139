"""Involuntary disruption on EC2's wire protocol: nodes that are replaced because of messages of the interruption queue, failed status
checks, vanished instances, or the end of their grace period."""

import datetime
import json
import time

import pytest

import aws
import faults
import kubelet
import messages
import services
import workloads
from kube import CAPACITY_TYPE, DISRUPTED_TAINT, DISRUPTING, INSTANCE_TYPE, NODE_POOL, annotations_of, bound_to, key, taint_keys, terminating
from services import CLUSTER, CLUSTER_NAME, NO_DRIFT, NODE_CLASS, one_per_node, small_pool

TAINT_SECONDS = 1.0  # from a message in the queue to the taint on the node
# Garbage collection runs periodically, and spares young instances, whose NodeClaim may not be written yet.
GARBAGE_SECONDS = 150
TERMINATION_TIMESTAMP = "karpenter.sh/nodeclaim-termination-timestamp"
GRACE, POD_GRACE = 8, 2  # seconds of a drain and of its pod
UNKNOWN_INSTANCE = "i-0123456789abcdef0"


def send(service, source, kind, /, *, age=0, **detail):
    """Puts an event into the queue as EventBridge does, with a time this many seconds ago."""
    at = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    event = {"version": "0", "id": f"{time.time_ns():x}", "detail-type": kind, "source": source, "account": aws.ACCOUNT, "time": at}
    send_text(service, json.dumps({**event, "region": aws.REGION, "resources": [], "detail": detail}))


def send_text(service, text):
    service.aws.sqs.send_message(QueueUrl=service.account.queue_url, MessageBody=text)


def wait_queue_empty(service):
    """Waits until every message has been deleted from the queue."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    counts = lambda: service.aws.sqs.get_queue_attributes(QueueUrl=service.account.queue_url, AttributeNames=names)["Attributes"]
    service.poll(lambda: all(int(count) == 0 for count in counts().values()), 15, "the queue empty", counts, every=0.1)


def messages_received(service):
    return service.stowage.metric("stowage_interruption_received_messages_total")


def pick(service):
    """A NodeClaim that nothing disrupts yet."""
    service.wait_bound("guard", 4, 60)
    return sorted(service.claims("guard"), key=key)[0]


def tainted(service, claim):
    """Whether the node of a NodeClaim is tainted for disruption or deleted."""
    node = service.mirror.node_of(claim)
    return node is None or terminating(node) or DISRUPTED_TAINT in taint_keys(node)


def wait_replaced(service, claim):
    """Waits until the NodeClaim and its instance are gone, and its pods run elsewhere."""
    service.wait(lambda: not service.current(claim), 90, f"{key(claim)} deleted")
    # Where nothing drained the node, Kubernetes deletes its pods: quarantine of 40 s, then a pass every 20 s.
    service.wait_bound("guard", 4, 120)
    assert service.instance_of(claim) not in service.instances()
    service.assert_nothing_leaked()


def assert_undisturbed(service, claim):
    current = service.current(claim)
    assert current is not None, "the NodeClaim was deleted"
    assert not (terminating(current) or tainted(service, current))
    assert service.stowage.ready()


@pytest.fixture(scope="class")
def estimated_memory(service):
    """Four nodes with a pod each; the largest memory that one of them was planned with."""
    service.plane.apply(*one_per_node("guard", 4, "guard"))
    service.wait_bound("guard", 4, 90)
    return max(kubelet.quantity(claim["status"]["capacity"]["memory"]) for claim in service.claims())


@pytest.mark.usefixtures("estimated_memory")
class TestInterruptions:
    """Stowage is configured to plan nodes with more memory than the kubelets report."""

    @staticmethod
    def environment(request):
        pool, graceful = small_pool("guard", "spot"), small_pool("graceful", "on-demand")
        pool["spec"]["disruption"]["budgets"] = [NO_DRIFT]
        graceful["spec"]["template"]["spec"]["terminationGracePeriod"] = f"{GRACE}s"
        plane = request.getfixturevalue("service_plane")
        return services.ec2(plane, [pool, graceful], settings={"VM_MEMORY_OVERHEAD_PERCENT": "0.05"})

    def test_1_a_spot_interruption_taints_the_node_within_a_second_and_replaces_it(self, service):
        claim = pick(service)
        begin = time.monotonic()
        detail = {"instance-id": service.instance_of(claim), "instance-action": "terminate"}
        send(service, "aws.ec2", "EC2 Spot Instance Interruption Warning", **detail)
        service.wait(lambda: tainted(service, claim), 20, "the node tainted")
        took = time.monotonic() - begin
        print(f"\nspot interruption: node tainted {took:.2f} s after the message", flush=True)
        assert took < TAINT_SECONDS
        wait_replaced(service, claim)
        wait_queue_empty(service)

    def test_2_a_scheduled_change_replaces_every_node_that_it_names(self, service):
        claim = pick(service)
        entities = [{"entityValue": service.instance_of(claim)}, {"entityValue": UNKNOWN_INSTANCE}]
        change = {"service": "EC2", "eventTypeCategory": "scheduledChange", "eventTypeCode": "AWS_EC2_INSTANCE_STOP_SCHEDULED"}
        send(service, "aws.health", "AWS Health Event", **change, affectedEntities=entities)
        service.wait(lambda: tainted(service, claim), 20, "the node tainted")
        wait_replaced(service, claim)
        wait_queue_empty(service)

    @pytest.mark.parametrize("state", ["stopping", "terminated"])
    def test_3_an_externally_stopped_instance_is_replaced(self, service, state):
        claim = pick(service)
        id = service.instance_of(claim)
        {"stopping": service.moto.stop_instances, "terminated": service.moto.terminate}[state](id)
        send(service, "aws.ec2", "EC2 Instance State-change Notification", **{"instance-id": id, "state": state})
        wait_replaced(service, claim)
        wait_queue_empty(service)

    def test_3a_forged_messages_delete_nothing(self, service):
        claim = pick(service)
        id = service.instance_of(claim)
        send(service, "aws.ec2", "EC2 Instance State-change Notification", age=120, **{"instance-id": id, "state": "terminated"})
        wait_queue_empty(service)
        assert service.stowage.metric("stowage_interruption_refused_messages_total", 'reason="running"') == 1
        assert_undisturbed(service, claim)

    def test_3b_later_nodes_are_planned_with_the_memory_of_the_first_ones(self, service, estimated_memory):
        latest = max(service.claims(), key=lambda claim: claim["metadata"]["creationTimestamp"])
        node = service.mirror.node_of(latest)
        assert estimated_memory > kubelet.quantity(node["status"]["capacity"]["memory"])
        service.assert_allocatable_as_planned(node)

    def test_4_a_rebalance_recommendation_is_only_reported(self, service):
        claim = pick(service)
        send(service, "aws.ec2", "EC2 Instance Rebalance Recommendation", **{"instance-id": service.instance_of(claim)})
        wait_queue_empty(service)
        events = lambda: [event for event in service.plane.events(key(claim)) if "rebalance" in json.dumps(event).lower()]
        service.poll(events, 15, "an event of the recommendation", lambda: service.plane.events(key(claim)))
        assert_undisturbed(service, claim)

    def test_5_irrelevant_messages_are_counted_and_dropped(self, service):
        claim = pick(service)
        id, before = service.instance_of(claim), messages_received(service)
        send_text(service, "not json")
        send_text(service, "[]")
        send_text(service, json.dumps({"version": "0"}))
        send(service, "aws.ec2", "EC2 Instance State-change Notification", **{"instance-id": id, "state": "running"})
        send(service, "aws.ec2", "EC2 Instance State-change Notification", **{"instance-id": 7})
        send(service, "aws.s3", "Object Created", **{"instance-id": id})
        send(service, "aws.health", "AWS Health Event", service="RDS", eventTypeCategory="scheduledChange", affectedEntities=[{"entityValue": id}])
        send(service, "aws.ec2", "EC2 Spot Instance Interruption Warning", **{"instance-id": UNKNOWN_INSTANCE, "instance-action": "terminate"})
        wait_queue_empty(service)
        assert messages_received(service) - before >= 8
        assert_undisturbed(service, claim)
        service.assert_no_errors()

    def test_6_an_instance_without_a_node_claim_is_terminated_and_those_of_others_are_not(self, service):
        owned = {"kubernetes.io/cluster/demo": "owned", CLUSTER_NAME: CLUSTER, NODE_POOL: "guard", NODE_CLASS: "default"}
        orphan = service.moto.launch(service.account, **owned)[0]["InstanceId"]
        others = {"kubernetes.io/cluster/other": "owned", CLUSTER_NAME: "other", NODE_POOL: "guard", NODE_CLASS: "default"}
        neighbor = service.moto.launch(service.account, **others)[0]["InstanceId"]
        bystander = service.moto.launch(service.account, **{CLUSTER_NAME: CLUSTER, "Name": "bastion"})[0]["InstanceId"]
        begin = time.monotonic()
        service.poll(lambda: orphan not in service.instances(), GARBAGE_SECONDS, "the orphan terminated")
        print(f"\norphan terminated after {time.monotonic() - begin:.0f} s", flush=True)
        service.wait(lambda: not service.mirror.node_of_instance(orphan), 20, "the orphan's Node deleted")
        assert neighbor in service.instances("other")
        assert bystander in service.instances()
        assert all(bound_to(pod) for pod in service.mirror.pods("guard"))
        service.moto.terminate(neighbor, bystander)

    def test_7_an_instance_that_vanishes_without_a_message_is_garbage_although_its_node_exists(self, service):
        # The cloud may not list an instance in the first minute after its launch.
        service.wait_bound("guard", 4, 60)
        claim = min(service.claims("guard"), key=lambda claim: claim["metadata"]["creationTimestamp"])
        # Without kubelets nothing deletes the Node.
        service.kubelets.down()
        try:
            service.api.annotate("Node", service.mirror.node_of(claim)["metadata"]["name"], {kubelet.REPORTS_NOT_READY: "yes"})
            begin = time.monotonic()
            service.moto.terminate(service.instance_of(claim))
            deleted = lambda: not service.current(claim) or terminating(service.current(claim))
            service.wait(deleted, GARBAGE_SECONDS, f"{key(claim)} deleted")
            print(f"\nno message, and the Node exists: NodeClaim deleted after {time.monotonic() - begin:.1f} s", flush=True)
        finally:
            service.kubelets.up()
        assert key(claim) in [line["NodeClaim"]["name"] for line in service.stowage.lines(messages.INSTANCE_GONE)]
        wait_replaced(service, claim)
        service.assert_no_errors()

    def test_7b_an_instance_that_vanishes_without_a_message_is_replaced_once_its_node_is_deleted(self, service):
        claim = pick(service)
        begin = time.monotonic()
        service.moto.terminate(service.instance_of(claim))
        wait_replaced(service, claim)
        print(f"\nno message, and the cloud controller deletes the Node: replaced after {time.monotonic() - begin:.1f} s", flush=True)

    def test_8_failed_checks_end_the_drain_and_scheduled_events_start_one(self, service):
        service.wait_bound("guard", 4, 60)
        instance, system, event, fine = sorted(service.claims("guard"), key=key)
        id = service.instance_of
        nodes = {claim["status"]["nodeName"]: key(claim) for claim in service.claims("guard")}
        ran_on_event = [key(pod) for pod in service.mirror.pods("guard") if nodes[bound_to(pod)] == key(event)]
        found = lambda: [
            faults.failed_check(id(instance), "instance", 180),
            faults.failed_check(id(system), "system", 180),
            faults.scheduled_event(id(event), "The instance is running on degraded hardware"),
            faults.failed_check(id(fine), "instance", 20),
            faults.scheduled_event(id(fine), "[Completed] The instance is running on degraded hardware"),
        ]
        expired = lambda: {key(claim) for claim in service.claims("guard") if TERMINATION_TIMESTAMP in annotations_of(claim)}
        with service.proxy.fault(faults.unhealthy(found)), service.mirror.sampling(expired) as samples:
            # The first check after a start is immediate; later ones follow every minute.
            service.stowage.stop()
            service.stowage.start()
            begin = time.monotonic()
            for claim in (instance, system, event):
                wait_replaced(service, claim)
        print(f"\nthree unhealthy instances replaced {time.monotonic() - begin:.1f} s after the start", flush=True)
        assert set().union(*samples) == {key(instance), key(system)}, "NodeClaims whose drain had an end"
        assert service.mirror.record.without_successor(key(event), ran_on_event) == [], "drained before the replacement was ready"
        for claim in (instance, system, event):
            assert service.plane.events(key(claim), "InstanceUnhealthy"), key(claim)
        assert service.plane.events(key(fine), "InstanceUnhealthy") == []
        assert_undisturbed(service, fine)
        service.assert_no_errors()

    def test_9_a_drain_ends_after_its_grace_period_and_not_before(self, service):
        made = workloads.workload("graceful", "server", 1, 1200, 512, nodeSelector={"team": "graceful"}, terminationGracePeriodSeconds=POD_GRACE)
        service.plane.apply(workloads.namespace("graceful"), made, workloads.disruption_budget("graceful", "server", 0))
        service.wait_bound("graceful", 1, 60)
        (claim,), (pod,) = service.claims("graceful"), service.mirror.pods("graceful")
        exists = lambda: any(key(other) == key(pod) and not terminating(other) for other in service.mirror.pods("graceful"))
        begin = time.monotonic()
        service.api.delete("NodeClaim", key(claim))
        service.wait(lambda: not exists(), 60, f"{key(pod)} deleted")
        pod_deleted = time.monotonic() - begin
        service.wait(lambda: not service.current(claim), 60, f"{key(claim)} deleted")
        claim_deleted = time.monotonic() - begin
        print(f"\na pod that may not be evicted was deleted after {pod_deleted:.1f} s, its NodeClaim after {claim_deleted:.1f} s", flush=True)
        # Deletion timestamps have a resolution of one second.
        assert pod_deleted > GRACE - POD_GRACE - 1, "deleted while there was time for its eviction"
        assert claim_deleted < GRACE + 40
        assert service.plane.events(claim["status"]["nodeName"], "FailedDraining"), "there is no event on what the drain waited for"
        service.wait_bound("graceful", 1, 60)
        service.assert_nothing_leaked()
        service.assert_no_errors()


class TestCapacityBlock:
    """A NodePool whose pods fit into a capacity block, or on nodes on demand."""

    @staticmethod
    def environment(request):
        kind = workloads.requirement(INSTANCE_TYPE, services.TYPE)
        pool = workloads.node_pool("block", labels={"team": "block"}, capacity_types=["reserved", "on-demand"], extra=[kind])
        return services.ec2(request.getfixturevalue("service_plane"), [pool])

    def test_1_its_nodes_are_replaced_before_it_ends(self, service):
        block = faults.CapacityBlock("cr-1", services.TYPE, aws.ZONES[1], size=2, end=time.time() + 3 * 3600)
        select = lambda *terms: service.api.patch("EC2NodeClass", "default", {"spec": {"capacityReservationSelectorTerms": terms}})
        known = lambda: service.api.find("EC2NodeClass", "default")["status"].get("capacityReservations", [])
        types = lambda: [claim["metadata"]["labels"][CAPACITY_TYPE] for claim in service.claims("block")]
        marks = lambda: {annotations_of(claim)[DISRUPTING] for claim in service.claims("block") if DISRUPTING in annotations_of(claim)}
        with service.proxy.fault(block):
            select({"id": block.id})
            service.poll(lambda: [one["state"] for one in known()] == ["active"], 60, "the capacity block known", known)
            service.plane.apply(*one_per_node("block", 2, "block"))
            service.wait_bound("block", 2, 90)
            assert (types(), block.instances) == (["reserved"] * 2, {service.instance_of(claim) for claim in service.claims("block")})
            old = {key(claim): claim["status"]["nodeName"] for claim in service.claims("block")}
            ran = {name: [key(pod) for pod in service.mirror.pods("block") if bound_to(pod) == node] for name, node in old.items()}
            block.end = time.time() + 39 * 60
            # A change of the class makes it read the block again.
            with service.mirror.sampling(marks) as samples:
                select({"id": block.id}, {"instanceMatchCriteria": "targeted"})
                service.wait(lambda: not set(old) & set(service.names("block")), 150, "the nodes in the block gone", known)
            service.wait_bound("block", 2, 60)
        leaves = datetime.datetime.fromtimestamp(block.end - 30 * 60, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert set().union(*samples) == {f"capacity_block_expiring/{leaves}"}
        assert types() == ["on-demand"] * 2, "nothing is launched into a block that ends"
        for name, pods in ran.items():
            assert pods and service.mirror.record.without_successor(name, pods) == [], "drained before the replacement was ready"
            assert service.plane.events(name, "CapacityBlockExpiring"), name
        assert service.stowage.metric("stowage_nodeclaims_disrupted_total", 'reason="capacity_block_expiring"') == 2
        service.assert_nothing_leaked()
        service.assert_no_errors()
