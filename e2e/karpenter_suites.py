"""Karpenter's own end-to-end suites (e2e/karpenter-suites): compiled unchanged, and run spec by spec in a control plane against what manages its nodes.

As a command, it prints the results of two runs side by side, as a table in Markdown:

    e2e/karpenter_suites.py STOWAGE.jsonl KARPENTER.jsonl

`Kwok` is Karpenter itself with its kwok provider, which runs the same specs as a peer.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil

import yaml

import harness
import karpenter
import workloads

MODULE = "sigs.k8s.io/karpenter"
KARPENTER = "karpenter"  # the subject that is Karpenter itself
FOLDER = harness.HERE / "karpenter-suites"
GRACE = 20  # seconds that a spec has for its clean-up after its limit
BUILD_TIMEOUT = 1200.0  # seconds; four minutes of CPU time on an empty cache


def go(*arguments):
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    return harness.run("go", "-C", FOLDER, *arguments, env=env, timeout=BUILD_TIMEOUT).stdout


def source():
    """The folder of Karpenter's module."""
    return pathlib.Path(go("list", "-mod=readonly", "-m", "-f", "{{.Dir}}", MODULE).strip())


def crds():
    """Karpenter's CRDs: the suites clean up objects of all of its kinds."""
    return [yaml.safe_load(file.read_text()) for file in sorted((source() / "pkg" / "apis" / "crds").glob("*.yaml"))]


class Suite:
    """A compiled suite. `node_class` and `pool` are the objects that it starts from; without them, those of Karpenter's kwok provider."""

    def __init__(self, name, folder, node_class=None, pool=None):
        self.folder, self.reports = folder, folder / "reports"
        self.program = folder / f"{name}.test"
        go("test", "-mod=readonly", "-trimpath", "-c", "-o", self.program, f"{MODULE}/test/suites/{name}")
        self.flags = []
        for flag, item in (("default-nodeclass", node_class), ("default-nodepool", pool)):
            if item:
                file = folder / f"{flag}.json"
                file.write_text(json.dumps(item))
                self.flags.append(f"--{flag}={file}")

    def ginkgo(self, report, *flags, env, timeout):
        """Runs the suite; returns the reports of its specs, of those that ran or would run, and the output."""
        flags = [f"--ginkgo.{flag}" for flag in (f"json-report={report}", "no-color", *flags)]
        done = harness.run(self.program, *flags, *self.flags, env={**os.environ, **env}, check=False, timeout=timeout)
        output = done.stdout + done.stderr
        try:
            specs = json.loads(report.read_text())[0]["SpecReports"]
        except (OSError, ValueError, LookupError) as error:
            raise harness.Failure(f"{self.program.name} wrote no report ({error}): {output[-3000:]}") from error
        return [spec for spec in specs if spec["LeafNodeType"] == "It" and spec["State"] not in ("skipped", "pending")], output

    def specs(self):
        """The names of the suite's specs."""
        found, _ = self.ginkgo(self.folder / "specs.json", "dry-run", env={"KUBECONFIG": os.devnull}, timeout=120)
        return [" ".join([*(spec["ContainerHierarchyTexts"] or []), spec["LeafNodeText"]]) for spec in found]

    def run(self, name, kubeconfig, limit):
        """Runs one spec for at most `limit` seconds. Returns seconds, and why it failed or None. What it writes about its performance is in
        `reports`, a file of JSON each."""
        shutil.rmtree(self.reports, ignore_errors=True)
        self.reports.mkdir()
        # ginkgo matches the name of the suite, a word, followed by that of the spec.
        flags = [rf"focus=^\w+ {re.escape(name)}$", f"timeout={limit}s", f"grace-period={GRACE}s"]
        env = {"KUBECONFIG": str(kubeconfig), "OUTPUT_DIR": str(self.reports)}
        found, output = self.ginkgo(self.folder / "report.json", *flags, env=env, timeout=limit + 5 * GRACE)
        if len(found) != 1:
            raise harness.Failure(f"{len(found)} specs of {self.program.name} are named {name!r}: {output[-3000:]}")
        spec = found[0]
        seconds = spec["RunTime"] / 1e9
        if spec["State"] == "passed":
            return seconds, None
        failure = spec.get("Failure") or {}
        place = failure.get("Location") or {}
        line = f"{pathlib.Path(place.get('FileName', '')).name}:{place.get('LineNumber', '')}"
        return seconds, f"{spec['State']} at {line}: {failure.get('Message', '')[:2000]}"


CATEGORIES, BELOW_CPU = ("c", "m", "r"), 32


def node_pool():
    """Like the NodePool that the suites start from with Karpenter's kwok provider: on-demand, sizes below 32 CPUs, no consolidation by itself."""
    pool = workloads.node_pool(consolidate_after="Never", capacity_types=["on-demand"])
    spec = pool["spec"]["template"]["spec"]
    spec["expireAfter"] = "Never"
    spec["requirements"] = [
        workloads.requirement("kubernetes.io/os", "linux"),
        workloads.requirement("karpenter.sh/capacity-type", "on-demand"),
        workloads.requirement("karpenter.k8s.aws/instance-category", *CATEGORIES),
        workloads.requirement("karpenter.k8s.aws/instance-cpu", str(BELOW_CPU), operator="Lt"),
    ]
    return pool


class Kwok(karpenter.Controller):
    """Karpenter with its kwok provider, with the rights of an administrator. `types` replaces the provider's own instance types."""

    def __init__(self, plane, folder, types=None):
        binary = folder / "karpenter-kwok"
        if not binary.exists():
            go("build", "-mod=readonly", "-trimpath", "-o", binary, f"{MODULE}/kwok")
        plane.kubectl("apply", "--server-side", "-f", source() / "kwok" / "apis" / "crds")
        settings = {"FEATURE_GATES": "StaticCapacity=true,NodeRepair=true"}
        if types is not None:
            file = folder / "instance-types.json"
            file.write_text(json.dumps(types))
            settings["INSTANCE_TYPES_FILE_PATH"] = str(file)
        super().__init__(plane, binary, settings | {"DISABLE_LEADER_ELECTION": "true", "KUBE_CLIENT_QPS": "500", "KUBE_CLIENT_BURST": "1000"})


def compiled(name, subject, folder):
    """The suite of this name for a subject, `stowage` or `karpenter`."""
    return Suite(name, folder, *(() if subject == KARPENTER else (workloads.node_class(), node_pool())))


@contextlib.contextmanager
def running(subject, plane, folder, types=None):
    """A subject that manages the nodes of a control plane, which is emptied before; yields its process. `types` are those of Karpenter's kwok provider."""
    plane.emptied()
    if subject == KARPENTER:
        plane.apply(*crds())
        with Kwok(plane, folder, types) as process:
            yield process
        return
    with harness.Stowage(plane, "nominate") as process:
        known = {crd["metadata"]["name"] for crd in plane.api.list("CustomResourceDefinition")}
        plane.apply(*(crd for crd in crds() if crd["metadata"]["name"] not in known))
        yield process


def results(file):
    """Results by spec; the last one counts."""
    return {result["spec"]: result for result in map(json.loads, file.read_text().splitlines())}


def cell(result):
    """A result as a table shows it, such as `passes, 14 s`."""
    if result is None:
        return "not run"
    return f"{'fails' if result['why'] else 'passes'}, {result['seconds']:.0f} s"


def table(ours, peers):
    """Results of two runs as Markdown."""
    rows = [f"| {name} | {cell(ours.get(name))} | {cell(peers.get(name))} |" for name in {**peers, **ours}]
    return "\n".join(["| spec | Stowage | Karpenter |", "|---|---|---|", *rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs=2, type=pathlib.Path)
    print(table(*map(results, parser.parse_args().files)))


if __name__ == "__main__":
    main()
