#!/usr/bin/env python3
"""Nodes that have to go, on EC2's wire protocol: by messages of the queue, by status checks, since their instance went without a word,
or since their time to drain is over. Run: python3 e2e/ec2_leaving_test.py
"""

import datetime
import json
import time
import unittest

import aws
import faults
import harness
import kubelet
import observe
import workloads
from ec2_service import CLUSTER, CLUSTER_NAME, NODE_CLASS, POOL, UNDRIFTED, Service, one_a_node, small
from observe import bound_to, key, leaving, tainted

TAINT_SECONDS = 1.0  # from a message in the queue to a closed node
# A young instance may belong to a claim that is not written yet; garbage is looked for now and then.
GARBAGE_SECONDS = 150
TERMINATION_TIMESTAMP = "karpenter.sh/nodeclaim-termination-timestamp"
NOT_READY = "stowage.dev/e2e-not-ready"  # by this annotation kwok says so of a node
PATIENCE, POD_GRACE = 8, 2  # seconds that a drain and its pod have


class Interruptions(Service):
    """Messages of the queue, to their effect; and what nobody knows. Stowage takes nodes to have more memory than the kubelets report."""

    settings = {"VM_MEMORY_OVERHEAD_PERCENT": "0.05"}

    @classmethod
    def pools(cls):
        pool, patient = small("guard", "spot"), small("patient", "on-demand")
        pool["spec"]["disruption"]["budgets"] = [UNDRIFTED]
        patient["spec"]["template"]["spec"]["terminationGracePeriod"] = f"{PATIENCE}s"
        return [pool, patient]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.plane.apply(*one_a_node("guard", 4, "guard"))
        cls.mirror.wait(lambda: cls.mirror.all_bound(4, "guard") and cls.mirror.settled(), 90, "guarded pods bound")
        cls.estimated = max(kubelet.quantity(claim["status"]["capacity"]["memory"]) for claim in cls.mirror.claims())

    def send(self, source, kind, **detail):
        """Puts an event into the queue as EventBridge would."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {"version": "0", "id": f"{time.time_ns():x}", "detail-type": kind, "source": source, "account": aws.ACCOUNT, "time": now}
        self.send_text(json.dumps({**event, "region": aws.REGION, "resources": [], "detail": detail}))

    def send_text(self, text):
        self.moto.aws.sqs("SendMessage", QueueUrl=self.account.queue_url, MessageBody=text)

    def queue_empty(self):
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.moto.aws.sqs("GetQueueAttributes", QueueUrl=self.account.queue_url, AttributeNames=names)["Attributes"]
        return all(int(found[name]) == 0 for name in names)

    def handled(self):
        """Waits until every message was taken out of the queue."""
        harness.wait_until(lambda: self.stowage.alive() and self.queue_empty(), 15, "the queue empty", every=0.1)

    def victim(self):
        """A NodeClaim that stays as far as anyone knows."""
        self.bound("guard", 4, 60)
        return sorted(self.claims("guard"), key=key)[0]

    def closed(self, claim):
        node = self.mirror.node_of(claim)
        return node is None or leaving(node) or tainted(node, observe.DISRUPTED_TAINT)

    def replaced(self, claim):
        """Waits until the NodeClaim and its instance are gone, and its pods run elsewhere."""
        self.wait(lambda: not self.now(claim), 90, f"{key(claim)} gone")
        self.bound("guard", 4, 60)
        self.assertNotIn(self.instance_of(claim), self.instances())
        self.nothing_is_leaked()

    def test_1_a_spot_interruption_closes_the_node_within_a_second_and_replaces_it(self):
        claim = self.victim()
        begin = time.monotonic()
        detail = {"instance-id": self.instance_of(claim), "instance-action": "terminate"}
        self.send("aws.ec2", "EC2 Spot Instance Interruption Warning", **detail)
        self.wait(lambda: self.closed(claim), 20, "the node closed")
        took = time.monotonic() - begin
        print(f"\nspot interruption: node closed {took:.2f} s after the message", flush=True)
        self.assertLess(took, TAINT_SECONDS)
        self.replaced(claim)
        self.handled()

    def test_2_a_scheduled_change_replaces_every_node_that_it_names(self):
        claim = self.victim()
        entities = [{"entityValue": self.instance_of(claim)}, {"entityValue": "i-0123456789abcdef0"}]
        change = {"service": "EC2", "eventTypeCategory": "scheduledChange", "eventTypeCode": "AWS_EC2_INSTANCE_STOP_SCHEDULED"}
        self.send("aws.health", "AWS Health Event", **change, affectedEntities=entities)
        self.wait(lambda: self.closed(claim), 20, "the node closed")
        self.replaced(claim)
        self.handled()

    def test_3_an_instance_that_somebody_ended_is_replaced(self):
        for state in ("stopping", "terminated"):
            with self.subTest(state):
                claim = self.victim()
                id = self.instance_of(claim)
                if state == "terminated":
                    self.moto.terminate(id)
                self.send("aws.ec2", "EC2 Instance State-change Notification", **{"instance-id": id, "state": state})
                self.replaced(claim)
        self.handled()

    def test_3b_later_nodes_are_as_large_as_the_first_ones_showed(self):
        latest = max(self.claims(), key=lambda claim: claim["metadata"]["creationTimestamp"])
        node = self.mirror.node_of(latest)
        self.assertGreater(self.estimated, kubelet.quantity(node["status"]["capacity"]["memory"]))
        self.as_planned(node)

    def test_4_a_rebalance_recommendation_is_told_and_no_more(self):
        claim = self.victim()
        self.send("aws.ec2", "EC2 Instance Rebalance Recommendation", **{"instance-id": self.instance_of(claim)})
        self.handled()
        told = lambda: [event for event in self.plane.events(key(claim)) if "rebalance" in json.dumps(event).lower()]
        harness.wait_until(told, 15, "an event of the recommendation", lambda: self.plane.events(key(claim)))
        self.unharmed(claim)

    def test_5_messages_that_say_nothing_are_counted_and_dropped(self):
        claim = self.victim()
        id, before = self.instance_of(claim), self.counted()
        self.send_text("not json")
        self.send_text("[]")
        self.send_text(json.dumps({"version": "0"}))
        self.send("aws.ec2", "EC2 Instance State-change Notification", **{"instance-id": id, "state": "running"})
        self.send("aws.ec2", "EC2 Instance State-change Notification", **{"instance-id": 7})
        self.send("aws.s3", "Object Created", **{"instance-id": id})
        self.send("aws.health", "AWS Health Event", service="RDS", eventTypeCategory="scheduledChange", affectedEntities=[{"entityValue": id}])
        self.send("aws.ec2", "EC2 Spot Instance Interruption Warning", **{"instance-id": "i-0123456789abcdef0", "instance-action": "terminate"})
        self.handled()
        self.assertGreaterEqual(self.counted() - before, 8)
        self.unharmed(claim)
        self.no_errors()

    def counted(self):
        """Messages received, by the service's own count."""
        metrics = self.stowage.metrics()
        return sum(value for name, value in metrics.items() if name.startswith("stowage_interruption_messages_total"))

    def now(self, claim):
        """The NodeClaim as it is now, or None."""
        return next((other for other in self.claims() if key(other) == key(claim)), None)

    def unharmed(self, claim):
        now = self.now(claim)
        self.assertIsNotNone(now, "the NodeClaim went")
        self.assertFalse(leaving(now) or self.closed(now))
        self.assertTrue(self.stowage.ready())

    def test_6_an_instance_of_no_node_claim_goes_and_those_of_others_stay(self):
        owned = {"kubernetes.io/cluster/demo": "owned", CLUSTER_NAME: CLUSTER, POOL: "guard", NODE_CLASS: "default"}
        orphan = self.moto.launch(self.account, **owned)[0]["instanceId"]
        others = {"kubernetes.io/cluster/other": "owned", CLUSTER_NAME: "other", POOL: "guard", NODE_CLASS: "default"}
        neighbour = self.moto.launch(self.account, **others)[0]["instanceId"]
        bystander = self.moto.launch(self.account, **{CLUSTER_NAME: CLUSTER, "Name": "bastion"})[0]["instanceId"]
        begin = time.monotonic()
        gone = lambda: orphan not in self.instances()
        harness.wait_until(lambda: self.stowage.alive() and gone(), GARBAGE_SECONDS, "the orphan terminated", every=0.5)
        print(f"\norphan terminated after {time.monotonic() - begin:.0f} s", flush=True)
        node = lambda id: next((node for node in self.mirror.nodes() if self.instance_of(node) == id), None)
        self.wait(lambda: not node(orphan), 20, "the orphan's Node gone")
        self.assertIn(neighbour, self.instances("other"))
        self.assertIn(bystander, self.instances())
        self.assertTrue(all(bound_to(pod) for pod in self.mirror.pods("guard")))
        self.moto.terminate(neighbour, bystander)

    def test_7_an_instance_that_goes_without_a_message_is_garbage_though_its_node_stays(self):
        # The cloud may not list yet what was launched in the last minute.
        self.bound("guard", 4, 60)
        claim = min(self.claims("guard"), key=lambda claim: claim["metadata"]["creationTimestamp"])
        # Nobody deletes the Node while the kubelets are away.
        self.kubelets.down()
        try:
            node = self.mirror.node_of(claim)["metadata"]["name"]
            self.plane.api.patch(f"{observe.NODES}/{node}", {"metadata": {"annotations": {NOT_READY: "yes"}}})
            begin = time.monotonic()
            self.moto.terminate(self.instance_of(claim))
            gone = lambda: not self.now(claim) or leaving(self.now(claim))
            self.wait(gone, GARBAGE_SECONDS, f"{key(claim)} deleted")
            print(f"\nno message, and the Node stays: NodeClaim deleted after {time.monotonic() - begin:.1f} s", flush=True)
        finally:
            self.kubelets.up()
        self.assertIn(key(claim), [line.get("claim") for line in self.stowage.lines("its instance is gone, it goes")])
        self.replaced(claim)
        self.no_errors()

    def test_7b_an_instance_that_goes_without_a_message_is_replaced_once_its_node_is_gone(self):
        claim = self.victim()
        begin = time.monotonic()
        self.moto.terminate(self.instance_of(claim))
        self.replaced(claim)
        print(f"\nno message, and the cloud controller deletes the Node: replaced after {time.monotonic() - begin:.1f} s", flush=True)

    def test_8_failed_checks_end_the_drain_and_scheduled_events_begin_one(self):
        self.bound("guard", 4, 60)
        instance, system, event, fine = sorted(self.claims("guard"), key=key)
        id = self.instance_of
        homes = {claim["status"]["nodeName"]: key(claim) for claim in self.claims("guard")}
        lived = [key(pod) for pod in self.mirror.pods("guard") if homes[bound_to(pod)] == key(event)]
        found = lambda: [
            faults.failed_check(id(instance), "instance", 180),
            faults.failed_check(id(system), "system", 180),
            faults.scheduled_event(id(event), "The instance is running on degraded hardware"),
            faults.failed_check(id(fine), "instance", 20),
            faults.scheduled_event(id(fine), "[Completed] The instance is running on degraded hardware"),
        ]
        hurried = lambda: {key(claim) for claim in self.claims("guard") if TERMINATION_TIMESTAMP in claim["metadata"].get("annotations", {})}
        with self.proxy.fault(faults.unhealthy(found)), self.mirror.watching(hurried) as seen:
            # The first question after a start does not wait for a minute.
            self.stowage.stop()
            self.stowage.start()
            begin = time.monotonic()
            for claim in (instance, system, event):
                self.replaced(claim)
        print(f"\nthree unhealthy instances replaced {time.monotonic() - begin:.1f} s after the start", flush=True)
        self.assertEqual(set().union(*seen), {key(instance), key(system)}, "drained without mercy")
        self.assertEqual(self.mirror.record.homeless_at_departure(key(event), lived), [], "drained before the replacement was ready")
        for claim in (instance, system, event):
            self.assertTrue(self.plane.events(key(claim), "InstanceUnhealthy"), key(claim))
        self.assertEqual(self.plane.events(key(fine), "InstanceUnhealthy"), [])
        self.unharmed(fine)
        self.no_errors()

    def test_9_a_drain_ends_after_its_grace_period_and_not_before(self):
        made = workloads.workload("patient", "server", 1, 1200, 512, nodeSelector={"team": "patient"}, terminationGracePeriodSeconds=POD_GRACE)
        self.plane.apply(workloads.namespace("patient"), made, workloads.disruption_budget("patient", "server", 0))
        self.bound("patient", 1, 60)
        (claim,), (pod,) = self.claims("patient"), self.mirror.pods("patient")
        stays = lambda: any(key(other) == key(pod) and not leaving(other) for other in self.mirror.pods("patient"))
        begin = time.monotonic()
        self.plane.api.delete(f"{observe.CLAIMS}/{key(claim)}")
        self.wait(lambda: not stays(), 60, f"{key(pod)} deleted")
        deleted = time.monotonic() - begin
        self.wait(lambda: not self.now(claim), 60, f"{key(claim)} gone")
        gone = time.monotonic() - begin
        print(f"\na pod that may not be evicted was deleted after {deleted:.1f} s, its NodeClaim gone after {gone:.1f} s", flush=True)
        # A deletion is written down by the second.
        self.assertGreater(deleted, PATIENCE - POD_GRACE - 1, "deleted while there was time for its eviction")
        self.assertLess(gone, PATIENCE + 40)
        self.assertTrue(self.plane.events(claim["status"]["nodeName"], "FailedDraining"), "nobody was told what the drain waited for")
        self.bound("patient", 1, 60)
        self.nothing_is_leaked()
        self.no_errors()


if __name__ == "__main__":
    unittest.main(verbosity=2)
