"""What a kubelet on an EC2 instance makes of its user data and its machine: the Node that it registers. Functions without I/O, but that
YAML is read by kubectl."""

import base64
import dataclasses
import email
import json
import re
import shlex
import subprocess
import tomllib

NODE_CONFIG = "application/node.eks.aws"
UNREGISTERED = {"key": "karpenter.sh/unregistered", "effect": "NoExecute"}
NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
FAKE_NODE = "kwok.x-k8s.io/node"  # by this annotation kwok knows the nodes it plays
STARTED_BY = "stowage.dev/e2e-kubelets"  # by this annotation `kubelets` knows the Nodes that it registered; holds the endpoint
ARCHITECTURES = {"x86_64": "amd64", "arm64": "arm64"}
MIB, GIB = 1 << 20, 1 << 30
EPHEMERAL_STORAGE = 20 * GIB  # of the root volume that every image family has by default
MEMORY_OVERHEAD = 75  # per mille of an instance's memory that the machine keeps for itself
DEVICES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Habana": "habana.ai/gaudi"}
# Suffixes of quantities that occur in kubelet settings.
UNITS = {"": 1, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 1 << 10, "Mi": MIB, "Gi": GIB, "Ti": 1 << 40}


@dataclasses.dataclass
class Settings:
    """What user data tell a kubelet."""

    labels: dict = dataclasses.field(default_factory=dict)
    taints: list = dataclasses.field(default_factory=list)
    max_pods: int | None = None
    kube_reserved: dict = dataclasses.field(default_factory=dict)
    system_reserved: dict = dataclasses.field(default_factory=dict)
    eviction_hard: dict = dataclasses.field(default_factory=dict)
    os: str = "linux"


# User data


def settings_of(data, parse_yaml):
    """The settings in user data as they are on the wire, in base64. `parse_yaml` makes an object of a YAML document.

    Raises ValueError for data that no node could boot from.
    """
    text = base64.b64decode(data or "").decode(errors="replace")
    settings = Settings()
    start = text.lstrip()
    if start.startswith(("MIME-Version:", "Content-Type:")):
        known = False
        for part in email.message_from_string(start).walk():
            if part.is_multipart():
                continue
            content = part.get_payload(decode=True).decode(errors="replace")
            if part.get_content_type() == NODE_CONFIG:
                node_config(parse_yaml(content), settings)
                known = True
            else:
                known |= bootstrap(content, settings)
    elif "<powershell>" in start:
        settings.os = "windows"
        known = extra_arguments(re.search(r"-KubeletExtraArgs\s+'([^']*)'", start), settings)
    elif (kubernetes := bottlerocket_table(start)) is not None:
        known = bottlerocket(kubernetes, settings)
    else:
        known = bootstrap(start, settings)
    if not known:
        # An image of someone's own, whose contract is to register with this taint.
        settings.taints.append(dict(UNREGISTERED))
    return settings


def yaml_by(kubectl, home):
    """A parser of Kubernetes-like objects in YAML: kubectl's, which nodeadm uses too. The folder `home` keeps it from anyone's kubeconfig."""

    def parse(text):
        command = [kubectl, "annotate", "--local", "--filename=-", "--output=json", "stowage.dev/parsed=yes"]
        done = subprocess.run(command, input=text, env={"HOME": str(home)}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"NodeConfig can't be read: {done.stderr.strip()}")
        return json.loads(done.stdout)

    return parse


def bootstrap(script, settings):
    """Takes what a shell script hands to bootstrap.sh of Amazon Linux 2. Says whether it does."""
    found = re.search(r"^/etc/eks/bootstrap\.sh\s.*$", script.replace("\\\n", " "), re.M)
    if not found:
        return False
    words = shlex.split(found[0])
    for name, value in zip(words, words[1:]):
        if name == "--kubelet-extra-args":
            flags(shlex.split(value), settings)
    return True


def extra_arguments(found, settings):
    if found:
        flags(shlex.split(found[1]), settings)
    return found is not None


def node_config(config, settings):
    """Takes a NodeConfig of nodeadm; what was taken before gives way, as nodeadm merges them in order."""
    kubelet = config.get("spec", {}).get("kubelet", {})
    given = kubelet.get("config", {})
    settings.taints = given.get("registerWithTaints", settings.taints)
    settings.max_pods = given.get("maxPods", settings.max_pods)
    settings.kube_reserved |= given.get("kubeReserved", {})
    settings.system_reserved |= given.get("systemReserved", {})
    settings.eviction_hard |= given.get("evictionHard", {})
    flags([word for flag in kubelet.get("flags", []) for word in shlex.split(flag)], settings)


def bottlerocket_table(text):
    """The table settings.kubernetes, or None where the text is no such TOML."""
    try:
        return tomllib.loads(text).get("settings", {}).get("kubernetes")
    except tomllib.TOMLDecodeError:
        return None


def bottlerocket(kubernetes, settings):
    settings.labels |= kubernetes.get("node-labels", {})
    for key, values in kubernetes.get("node-taints", {}).items():
        for value in [values] if isinstance(values, str) else values:
            settings.taints.append(taint(f"{key}={value}"))
    settings.max_pods = kubernetes.get("max-pods", settings.max_pods)
    settings.kube_reserved |= kubernetes.get("kube-reserved", {})
    settings.system_reserved |= kubernetes.get("system-reserved", {})
    settings.eviction_hard |= kubernetes.get("eviction-hard", {})
    return True


def flags(words, settings):
    """Takes the kubelet's command-line flags."""
    for word in words:
        name, _, value = word.partition("=")
        items = [item for item in value.split(",") if item]
        if name == "--node-labels":
            settings.labels |= pairs(items, "=")
        elif name == "--register-with-taints":
            settings.taints += [taint(item) for item in items]
        elif name == "--max-pods":
            settings.max_pods = int(value)
        elif name == "--kube-reserved":
            settings.kube_reserved |= pairs(items, "=")
        elif name == "--system-reserved":
            settings.system_reserved |= pairs(items, "=")
        elif name == "--eviction-hard":
            settings.eviction_hard |= pairs(items, "<")


def pairs(items, separator):
    return {key: value for key, _, value in (item.partition(separator) for item in items)}


def taint(text):
    """A taint of `key=value:Effect` or `key:Effect`."""
    front, _, effect = text.rpartition(":")
    key, _, value = front.partition("=")
    return {"key": key, "effect": effect, **({"value": value} if value else {})}


# The machine


def quantity(text):
    """A quantity such as 500m, 1Gi or 2 as a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(text))
    if not found or found[2] not in UNITS:
        raise ValueError(f"{text} is no quantity")
    return float(found[1]) * UNITS[found[2]]


def eni_pods(shape):
    """Pods that a type's network interfaces give addresses to, of an answer's item of DescribeInstanceTypes."""
    network = shape["networkInfo"]
    cards = network.get("networkCards") or [{"maximumNetworkInterfaces": network["maximumNetworkInterfaces"]}]
    interfaces = int(cards[int(network.get("defaultNetworkCardIndex") or 0)]["maximumNetworkInterfaces"])
    return interfaces * (int(network["ipv4AddressesPerInterface"]) - 1) + 2


def resources(shape, settings):
    """Capacity and allocatable of an instance type, as a kubelet reports them."""
    cores, mib = int(shape["vCpuInfo"]["defaultVCpus"]), int(shape["memoryInfo"]["sizeInMiB"])
    if shape["processorInfo"]["supportedArchitectures"][0] == "arm64":
        mib -= 64
    memory = (mib - -(-mib * MEMORY_OVERHEAD // 1000)) * MIB
    pods = settings.max_pods or eni_pods(shape)
    capacity = {"cpu": cores * 1000, "memory": memory, "ephemeral-storage": EPHEMERAL_STORAGE, "pods": pods}
    capacity |= devices(shape)

    reserved = {"cpu": reserved_cpu(cores), "memory": (11 * eni_pods(shape) + 255) * MIB, "ephemeral-storage": GIB}
    reserved |= amounts(settings.kube_reserved)
    for name, amount in amounts(settings.system_reserved).items():
        reserved[name] = reserved.get(name, 0) + amount
    eviction = {"memory.available": "100Mi", "nodefs.available": "10%"} | settings.eviction_hard
    for name, signal in (("memory", "memory.available"), ("ephemeral-storage", "nodefs.available")):
        reserved[name] += threshold(eviction[signal], capacity[name])
    allocatable = {name: max(0, amount - reserved.get(name, 0)) for name, amount in capacity.items()}
    return written(capacity), written(allocatable)


def devices(shape):
    """Devices that their plugins report, which start with the kubelet here."""
    found = {}
    for gpu in shape.get("gpuInfo", {}).get("gpus") or []:
        name = DEVICES.get(gpu.get("manufacturer"))
        if name:
            found[name] = found.get(name, 0) + int(gpu["count"])
    neurons = shape.get("neuronInfo", {}).get("neuronDevices") or []
    if neurons:
        found["aws.amazon.com/neuron"] = sum(int(device["count"]) for device in neurons)
    return found


def reserved_cpu(cores):
    """Millicores that the kubelet keeps: 6 % of the first core, 1 % of the second, 0.5 % of the next two, 0.25 % of the others."""
    bands = [(0, 1, 60), (1, 2, 10), (2, 4, 5), (4, cores, 2.5)]
    return sum(int(max(0, min(cores, high) - low) * share) for low, high, share in bands)


def amounts(given):
    """Settings by resource as numbers: millicores of CPU, else units."""
    return {name: int(quantity(text) * (1000 if name == "cpu" else 1)) for name, text in given.items()}


def threshold(text, capacity):
    text = str(text)
    if text.endswith("%"):
        share = float(text[:-1])
        return 0 if share == 100 else int(-(-capacity * share // 100))
    return int(quantity(text))


def written(amounts):
    """Amounts as a kubelet writes them."""
    out = {}
    for name, amount in amounts.items():
        if name == "cpu":
            out[name] = str(amount // 1000) if amount % 1000 == 0 else f"{amount}m"
        elif name in ("memory", "ephemeral-storage"):
            out[name] = f"{amount // 1024}Ki"
        else:
            out[name] = str(amount)
    return out


# The Node


def name_of(instance):
    """The name of an instance's Node: its private DNS name."""
    return instance.get("privateDnsName") or instance["instanceId"]


def provider_id(instance):
    return f"aws:///{instance['placement']['availabilityZone']}/{instance['instanceId']}"


def node(instance, shape, settings, region, endpoint, version, now):
    """The Node that an instance's kubelet registers, with what the cloud controller adds. `now` is a time in RFC 3339."""
    name, zone, kind = name_of(instance), instance["placement"]["availabilityZone"], instance["instanceType"]
    arch = ARCHITECTURES[shape["processorInfo"]["supportedArchitectures"][0]]
    capacity, allocatable = resources(shape, settings)
    taints = [*(taint for taint in settings.taints if taint["key"] != NOT_READY["key"]), NOT_READY]
    # Kubelets and cloud controllers still set the old names beside the new.
    labels = settings.labels | {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": settings.os,
        "kubernetes.io/arch": arch,
        "node.kubernetes.io/instance-type": kind,
        "topology.kubernetes.io/zone": zone,
        "topology.kubernetes.io/region": region,
        "beta.kubernetes.io/os": settings.os,
        "beta.kubernetes.io/arch": arch,
        "beta.kubernetes.io/instance-type": kind,
        "failure-domain.beta.kubernetes.io/zone": zone,
        "failure-domain.beta.kubernetes.io/region": region,
    }
    conditions = [
        ("Ready", "KubeletNotReady", "the kubelet has just started"),
        ("MemoryPressure", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
        ("DiskPressure", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        ("PIDPressure", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ]
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
    addresses = [("InternalIP", instance.get("privateIpAddress")), ("InternalDNS", name), ("Hostname", name)]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": {FAKE_NODE: "fake", STARTED_BY: endpoint}},
        "spec": {"providerID": provider_id(instance), "taints": taints},
        "status": {
            "capacity": capacity,
            "allocatable": allocatable,
            "addresses": [{"type": kind, "address": address} for kind, address in addresses if address],
            "conditions": [{"type": kind, "status": "False", "reason": reason, "message": message, **times} for kind, reason, message in conditions],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            "nodeInfo": {
                "architecture": arch,
                "operatingSystem": settings.os,
                "osImage": f"played by Stowage's e2e tools ({instance.get('imageId', 'no image')})",
                "kernelVersion": "6.12.0",
                "kubeletVersion": version,
                "kubeProxyVersion": version,
                "containerRuntimeVersion": "containerd://2.1.0",
                "machineID": instance["instanceId"].removeprefix("i-"),
                "systemUUID": instance["instanceId"],
                "bootID": instance["instanceId"],
            },
        },
    }
