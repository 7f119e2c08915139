"""The instance types of the embedded catalog for Karpenter's kwok provider, which otherwise has types of its own: so that two runs compare."""

import functools
import json
import math

import harness

CATALOG = harness.HERE.parent / "src" / "cloud" / "data" / "ec2-us-east-1.json"
GO_ARCH = {"x86_64": "amd64", "arm64": "arm64"}
KWOK_MEMORY = 10  # MiB that the kwok provider takes off every type's capacity
PODS_MEMORY, BASE_MEMORY, EVICTION_MEMORY = 11, 255, 100  # MiB that the kubelet of AL2023 reserves: for each pod, for itself, at least free
ARM_MEMORY = 64  # MiB that the kernel reserves on Arm
VM_OVERHEAD = 0.075  # Karpenter's VM_MEMORY_OVERHEAD_PERCENT


@functools.cache
def catalog():
    """The instance types, a dictionary each."""
    content = json.loads(CATALOG.read_text())
    shared = content["shared"]
    rows = [dict(zip(content["columns"], row)) for row in content["rows"]]
    return [{name: shared[name][value] if name in shared else value for name, value in row.items()} for row in rows]


def prices():
    """USD per hour on demand, by the names of both clouds."""
    known = {entry["name"]: entry["onDemandUsdPerHour"] for entry in catalog()}
    return known | {kwok_name(name): price for name, price in known.items()}


def kwok_name(name):
    """The kwok provider reads a size, not a number of CPUs, from a name with a point."""
    return name.replace(".", "-")


def memory_and_pods(entry):
    """MiB that a node has for pods, and their number, with AL2023, by the formulas of `src/cloud/catalog/overhead.rs`."""
    pods = entry["enis"] * (entry["ipv4PerEni"] - 1) + 2
    memory = entry["memoryMib"] - ARM_MEMORY * ("arm64" in entry["arch"])
    usable = memory - math.ceil(memory * VM_OVERHEAD)
    return usable - PODS_MEMORY * pods - BASE_MEMORY - EVICTION_MEMORY, pods


def kwok_type(entry):
    """An entry of the kwok provider's INSTANCE_TYPES_FILE_PATH. The number of CPUs is also a label, so it stays whole: 100m of it are reserved on
    every node, where EC2's have 70m (2 CPUs) to 130m (24 CPUs)."""
    memory, pods = memory_and_pods(entry)
    return {
        "name": kwok_name(entry["name"]),
        "architecture": GO_ARCH[entry["arch"][0]],
        "operatingSystems": ["linux"],
        "resources": {"cpu": str(entry["vcpu"]), "memory": f"{memory + KWOK_MEMORY}Mi", "pods": str(pods), "ephemeral-storage": "20Gi"},
        "offerings": [
            {
                "Price": entry["onDemandUsdPerHour"],
                "Available": True,
                "Requirements": [
                    {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                    {"key": "topology.kubernetes.io/zone", "operator": "In", "values": [zone]},
                ],
            }
            for zone in entry["zones"]
        ],
    }


def kwok_types(categories, below_cpu):
    """The types of some categories (the letters that their names begin with) and with fewer CPUs than `below_cpu` that are sold on demand."""
    kept = (entry for entry in catalog() if category(entry["name"]) in categories and entry["vcpu"] < below_cpu)
    return [kwok_type(entry) for entry in kept if entry["onDemandUsdPerHour"] and "on-demand" in entry["usageClasses"]]


def category(name):
    """`c` of `c7gn.large`."""
    return name[: next((at for at, letter in enumerate(name) if not letter.isalpha()), len(name))]
