"""The instance types of the embedded catalog for Karpenter's kwok provider, which otherwise has types of its own: so that two runs compare."""

import functools

import check_plan
import harness

ROOT = harness.HERE.parent
# Labels and resources of each type with AL2023: a test compares it with what the service computes.
TABLE = ROOT / "tests" / "data" / "instance-types.txt"
KWOK_MEMORY = 10  # MiB that the kwok provider takes off every type's capacity


@functools.cache
def catalog():
    """The instance types of the catalog by name, with their columns of the table."""
    header, *lines = [line.split(" ") for line in TABLE.read_text().splitlines()]
    table = {line[0]: dict(zip(header, line)) for line in lines}
    return {name: table[name] | entry for name, entry in check_plan.instance_types().items()}


def prices():
    """USD per hour on demand, by the names of both clouds."""
    known = {name: entry.get("onDemandUsdPerHour") for name, entry in catalog().items()}
    return known | {kwok_name(name): price for name, price in known.items()}


def kwok_name(name):
    """The kwok provider reads a size, not a number of CPUs, from a name with a point."""
    return name.replace(".", "-")


def kwok_type(entry):
    """An entry of the kwok provider's INSTANCE_TYPES_FILE_PATH. The number of CPUs is also a label, so it stays whole: 100m of it are reserved on
    every node, where EC2's have 70m (2 CPUs) to 130m (24 CPUs)."""
    memory = int(entry["allocatable.memory"].removesuffix("Mi")) + KWOK_MEMORY
    resources = {"cpu": entry["cpu"], "memory": f"{memory}Mi", "pods": entry["pods"], "ephemeral-storage": entry["ephemeral-storage"]}
    offerings = [
        {
            "Price": entry["onDemandUsdPerHour"],
            "Available": True,
            "Requirements": [
                {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                {"key": "topology.kubernetes.io/zone", "operator": "In", "values": [zone]},
            ],
        }
        for zone in entry["zones"]
    ]
    return {
        "name": kwok_name(entry["name"]),
        "architecture": entry["kubernetes.io/arch"],
        "operatingSystems": ["linux"],
        "resources": resources,
        "offerings": offerings,
    }


def kwok_types(categories, below_cpu):
    """The types of some categories and with fewer CPUs than `below_cpu` that are sold on demand."""
    sold = (entry for entry in catalog().values() if entry.get("onDemandUsdPerHour") and "on-demand" in entry["usageClasses"])
    return [kwok_type(entry) for entry in sold if entry["karpenter.k8s.aws/instance-category"] in categories and entry["vcpu"] < below_cpu]
