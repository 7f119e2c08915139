"""Plans of random clusters, replayed through kube-scheduler's own filter plugins (e2e/replay): every planned pod binds where planned.

STOWAGE_REPLAY=N judges N clusters (default 60), from STOWAGE_REPLAY_SEED on.
"""

import concurrent.futures
import copy
import json
import os
import subprocess

import pytest

from check_plan import instance_types
from harness import ROOT, binary
from replay_clusters import HOST, ZONE, ZONES, Cluster, node

CLUSTERS = int(os.environ.get("STOWAGE_REPLAY", "60"))
FIRST_SEED = int(os.environ.get("STOWAGE_REPLAY_SEED", "1"))


@pytest.fixture(scope="session")
def replay(tmp_path_factory):
    """Judges clusters: a list of the replay's inputs, to a list of its verdicts."""
    program = tmp_path_factory.mktemp("replay") / "replay"
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    subprocess.run(["go", "build", "-mod=readonly", "-trimpath", "-o", program, "."], cwd=ROOT / "e2e" / "replay", env=environment, check=True)

    def judge(clusters):
        text = "\n".join(json.dumps(cluster) for cluster in clusters)
        run = subprocess.run([program], input=text, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return [json.loads(line) for line in run.stdout.splitlines()]

    return judge


@pytest.fixture(scope="session")
def types():
    return instance_types()


def planned(cluster, folder):
    """The plan of a cluster."""
    file = folder / f"{cluster.seed}.json"
    file.write_text(json.dumps(cluster.manifests()))
    run = subprocess.run([binary(), "simulate", "--filename", file, "--spot-ratio", "0.4", "--output", "json"], capture_output=True, text=True)
    assert run.returncode in (0, 3), f"seed {cluster.seed}: {run.stderr}"
    plan = json.loads(run.stdout)
    placed = [pod for node in plan["nodes"] + plan["existing"] for pod in node["pods"]] + [left["pod"] for left in plan["unschedulable"]]
    assert sorted(placed) == sorted(f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in cluster.pods), f"seed {cluster.seed}"
    return plan


def test_every_planned_pod_binds_where_planned_in_any_order(replay, types, tmp_path):
    clusters = [Cluster(seed, types) for seed in range(FIRST_SEED, FIRST_SEED + CLUSTERS)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        plans = list(pool.map(lambda cluster: planned(cluster, tmp_path), clusters))
    verdicts = replay([cluster.replayed(plan) for cluster, plan in zip(clusters, plans)])
    assert len(verdicts) == CLUSTERS
    pods, planned_pods = sum(len(cluster.pods) for cluster in clusters), sum(verdict["planned"] for verdict in verdicts)
    print(f"\n{CLUSTERS} clusters from seed {FIRST_SEED} on: {planned_pods} of {pods} pods planned, {sum(len(plan['nodes']) for plan in plans)} new nodes", flush=True)
    assert planned_pods > pods / 2, "the clusters are too constrained to say anything"
    rejected = [verdict for verdict in verdicts if verdict["failures"]]
    first = [f"seed {verdict['name']}: {len(verdict['failures'])} of {verdict['planned']} pods in 3 orders, such as {verdict['failures'][0]}" for verdict in rejected]
    assert not rejected, f"{len(rejected)} clusters with rejected pods:\n" + "\n".join(first)


class TestReplay:
    """The replay itself rejects wrong plans."""

    @staticmethod
    def input(types, spec, labels=None, second=None):
        """Two pods of a spec planned on a new node in the first zone, or the second pod on another."""
        base = Cluster(1, types)
        base.pods, base.running, base.nodes, base.claims, base.volumes, base.daemon = [], [], [], [], [], False
        nodes = [node("new-0", types["m5.large"], ZONES[0], "on-demand"), node("new-1", types["m5.large"], ZONES[1], "on-demand")]
        pods = [base.pod(f"p-{at}", "default", labels or {"app": "p"}, spec, (100, 128, {})) for at in range(2)]
        on = ["new-0", second or "new-0"]
        empty = base.replayed({"existing": [], "nodes": []})
        return empty | {"nodes": nodes, "planned": [{"pod": pod, "node": name} for pod, name in zip(pods, on)]}

    @staticmethod
    def plugins(replay, cluster):
        return {failure["plugin"] for failure in replay([cluster])[0]["failures"]}

    def test_a_valid_plan_is_accepted(self, replay, types):
        assert self.plugins(replay, self.input(types, {})) == set()

    def test_pods_beyond_the_capacity_are_rejected(self, replay, types):
        cluster = self.input(types, {})
        for one in cluster["planned"]:
            one["pod"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "1500m"
        assert self.plugins(replay, cluster) == {"NodeResourcesFit"}

    def test_a_taint_without_toleration_is_rejected(self, replay, types):
        cluster = self.input(types, {})
        cluster["nodes"][0]["spec"]["taints"] = [{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]
        assert self.plugins(replay, cluster) == {"TaintToleration"}

    def test_a_wrong_zone_is_rejected(self, replay, types):
        assert self.plugins(replay, self.input(types, {"nodeSelector": {ZONE: ZONES[2]}})) == {"NodeAffinity"}

    def test_a_volume_of_another_zone_is_rejected(self, replay, types):
        cluster = self.input(types, {})
        base = Cluster(1, types)
        base.claims, base.volumes = [], []
        while not base.volumes:
            base.claims = []
            base.claim(cluster["planned"][0]["pod"], "default")
        base.volumes[0]["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] = [ZONES[2]]
        assert self.plugins(replay, cluster | {"claims": base.claims, "volumes": base.volumes}) == {"VolumeBinding"}

    @pytest.mark.parametrize("key", [ZONE, HOST])
    def test_pods_that_exclude_each_other_are_rejected_together_only(self, replay, types, key):
        terms = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": key, "labelSelector": {"matchLabels": {"app": "p"}}}]}
        spec = {"affinity": {"podAntiAffinity": terms}}
        assert self.plugins(replay, self.input(types, spec)) == {"InterPodAffinity"}
        assert self.plugins(replay, self.input(types, spec, second="new-1")) == set()

    def test_a_skew_is_rejected_and_its_correction_accepted(self, replay, types):
        spread = {"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "p"}}}
        spec = {"topologySpreadConstraints": [spread]}
        assert self.plugins(replay, self.input(types, spec)) == {"PodTopologySpread"}
        assert self.plugins(replay, self.input(types, spec, second="new-1")) == set()

    def test_a_pod_that_must_wait_for_another_binds_in_any_order(self, replay, types):
        terms = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "leader"}}}]}
        cluster = self.input(types, {"affinity": {"podAffinity": terms}})
        assert self.plugins(replay, cluster) == {"InterPodAffinity"}, "nobody leads"
        leader = copy.deepcopy(cluster["planned"][0]["pod"])
        leader["metadata"] |= {"name": "leader", "labels": {"app": "leader"}}
        del leader["spec"]["affinity"]
        cluster["planned"].append({"pod": leader, "node": "new-0"})
        assert self.plugins(replay, cluster) == set()
