"""The life cycle of nodes on a real control plane: an instance ends after its volumes are detached, an unhealthy node is replaced, and forced deletions
are reported.
"""

import kube
import services
import workloads
from kube import condition, key

POOL, SPACE = "lifecycle", "lifecycle"
PODS = 6


def attachment(node, volume):
    spec = {"attacher": "ebs.csi.aws.com", "nodeName": node, "source": {"persistentVolumeName": volume}}
    return {"apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment", "metadata": {"name": f"csi-{volume}"}, "spec": spec}


def status_of(service, claim, kind):
    found = service.current(claim)
    return condition(found, kind).get("status") if found else None


class TestNodeLifecycle:
    """Six nodes with one protected pod each: nothing disrupts them voluntarily."""

    @staticmethod
    def environment(request):
        pool = workloads.node_pool(POOL, consolidate_after="Never", labels={"team": POOL})
        protected = {kube.DO_NOT_DISRUPT: "true"}
        server = workloads.workload(SPACE, "server", PODS, 500, 512, nodeSelector={"team": POOL}, **workloads.host_alone("server"))
        server["spec"]["template"]["metadata"]["annotations"] = protected
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", workloads.namespace(SPACE), pool, server)

    def victim(self, service):
        """A NodeClaim, its Node and the pod on it."""
        pod = next(pod for pod in service.mirror.pods(SPACE) if kube.bound_to(pod))
        node = kube.bound_to(pod)
        return next(claim for claim in service.claims(POOL) if claim.get("status", {}).get("nodeName") == node), node, pod

    def test_1_an_instance_ends_after_its_volumes_are_detached(self, service):
        service.wait_bound(SPACE, PODS, 60)
        assert all(status_of(service, claim, "ConsistentStateFound") == "True" for claim in service.claims(POOL))
        claim, node, pod = self.victim(service)
        service.plane.apply(attachment(node, "pv-e2e"))
        service.api.delete("NodeClaim", key(claim))
        service.wait(lambda: status_of(service, claim, "Drained") == "Unknown", 20, "a draining node")
        service.api.delete("Pod", pod["metadata"]["name"], SPACE)
        service.wait(lambda: status_of(service, claim, "VolumesDetached") == "Unknown", 20, "a node that waits for its volumes", lambda: str(service.current(claim)))
        service.poll(lambda: service.plane.events(key(claim), "AwaitingVolumeDetachment"), 20, "an event", service.stowage.tail)
        uid = claim["metadata"]["uid"]
        service.wait(lambda: service.mirror.all_bound(PODS, SPACE), 60, "the pod elsewhere")
        assert any(entry["client_token"] == uid for entry in service.stowage.instances().values()), "terminated with a volume"
        service.plane.kubectl("delete", "volumeattachment", "csi-pv-e2e")
        service.wait(lambda: service.current(claim) is None, 30, "no claim", lambda: str(service.current(claim)))
        service.assert_nothing_leaked()

    def test_2_an_unhealthy_node_is_replaced_in_spite_of_its_protection(self, service):
        claim, node, pod = self.victim(service)
        service.make_not_ready(node)
        assert not kube.being_disrupted(service.current(claim))
        service.make_unhealthy(node)
        service.wait(lambda: service.current(claim) is None, 60, "no unhealthy node", lambda: str(service.current(claim)))
        service.wait_bound(SPACE, PODS, 60)
        assert pod["metadata"]["uid"] not in service.uids(SPACE)
        assert service.plane.events(key(claim), "NodeUnhealthy") and service.plane.events(pod["metadata"]["name"], "Disrupted")
        assert service.stowage.metric("stowage_nodeclaims_unhealthy_disrupted_total", 'condition="ready"') == 1
        service.assert_nothing_leaked()
        service.assert_no_errors()
