"""The Node that a kubelet on an EC2 instance registers, from the instance's user data and type. Functions without I/O; descriptions of
instances and types are those of boto3."""

import base64
import dataclasses
import email
import re
import shlex
import tomllib

import yaml

NODE_CONFIG = "application/node.eks.aws"
UNREGISTERED = {"key": "karpenter.sh/unregistered", "effect": "NoExecute"}
NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
FAKE_NODE = "kwok.x-k8s.io/node"  # annotation of the nodes that kwok simulates
REPORTS_NOT_READY = "stowage.dev/e2e-not-ready"  # annotation that makes kwok report a node as not ready
STARTED_BY = "stowage.dev/e2e-kubelets"  # annotation of the Nodes that `kubelets` registered; its value is the endpoint
ARCHITECTURES = {"x86_64": "amd64", "arm64": "arm64"}
MIB, GIB = 1 << 20, 1 << 30
EPHEMERAL_STORAGE = 20 * GIB  # of the default root volume of every image family
MEMORY_OVERHEAD = 75  # per mille of an instance's memory that hypervisor and firmware use
DEVICES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Habana": "habana.ai/gaudi"}
# Suffixes of quantities in kubelet settings.
UNITS = {"": 1, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 1 << 10, "Mi": MIB, "Gi": GIB, "Ti": 1 << 40}


@dataclasses.dataclass
class Settings:
    """The kubelet settings in user data."""

    labels: dict = dataclasses.field(default_factory=dict)
    taints: list = dataclasses.field(default_factory=list)
    max_pods: int | None = None
    kube_reserved: dict = dataclasses.field(default_factory=dict)
    system_reserved: dict = dataclasses.field(default_factory=dict)
    eviction_hard: dict = dataclasses.field(default_factory=dict)
    os: str = "linux"


# User data


def settings_of(data):
    """The settings in user data, which are in base64 as on the wire. Raises ValueError for user data that no node can boot from."""
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
        # A custom image, which must register with this taint.
        settings.taints.append(dict(UNREGISTERED))
    return settings


def parse_yaml(text):
    """A YAML document as an object. Raises ValueError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the NodeConfig is not valid YAML: {error}") from None


def bootstrap(script, settings):
    """Applies the arguments of bootstrap.sh in a script of Amazon Linux 2. Returns whether the script calls it."""
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
    """Applies a NodeConfig of nodeadm over earlier ones: nodeadm merges them in order."""
    kubelet = config.get("spec", {}).get("kubelet", {})
    given = kubelet.get("config", {})
    settings.taints = given.get("registerWithTaints", settings.taints)
    settings.max_pods = given.get("maxPods", settings.max_pods)
    settings.kube_reserved |= given.get("kubeReserved", {})
    settings.system_reserved |= given.get("systemReserved", {})
    settings.eviction_hard |= given.get("evictionHard", {})
    flags([word for flag in kubelet.get("flags", []) for word in shlex.split(flag)], settings)


def bottlerocket_table(text):
    """The table settings.kubernetes, or None if the text is not such a TOML document."""
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
    """Applies the kubelet's command-line flags."""
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
        raise ValueError(f"{text} is not a quantity")
    return float(found[1]) * UNITS[found[2]]


def eni_pods(shape):
    """Pods that the network interfaces of an instance type have addresses for."""
    network = shape["NetworkInfo"]
    cards = network.get("NetworkCards") or [{"MaximumNetworkInterfaces": network["MaximumNetworkInterfaces"]}]
    interfaces = cards[network.get("DefaultNetworkCardIndex") or 0]["MaximumNetworkInterfaces"]
    return interfaces * (network["Ipv4AddressesPerInterface"] - 1) + 2


def resources(shape, settings):
    """Capacity and allocatable of an instance type, as a kubelet reports them."""
    cores, mib = shape["VCpuInfo"]["DefaultVCpus"], shape["MemoryInfo"]["SizeInMiB"]
    if shape["ProcessorInfo"]["SupportedArchitectures"][0] == "arm64":
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
    """Devices that device plugins report; here they start with the kubelet."""
    found = {}
    for gpu in shape.get("GpuInfo", {}).get("Gpus") or []:
        name = DEVICES.get(gpu.get("Manufacturer"))
        if name:
            found[name] = found.get(name, 0) + gpu["Count"]
    neurons = shape.get("NeuronInfo", {}).get("NeuronDevices") or []
    if neurons:
        found["aws.amazon.com/neuron"] = sum(device["Count"] for device in neurons)
    return found


def reserved_cpu(cores):
    """Millicores reserved for the kubelet: 6 % of the first core, 1 % of the second, 0.5 % of the next two, 0.25 % of the others."""
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
    """Amounts as a kubelet formats them."""
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
    return instance.get("PrivateDnsName") or instance["InstanceId"]


def provider_id(instance):
    return f"aws:///{instance['Placement']['AvailabilityZone']}/{instance['InstanceId']}"


def node(instance, shape, settings, region, endpoint, version, now):
    """The Node that an instance's kubelet registers, with the labels of the cloud controller. `now` is a time in RFC 3339."""
    name, zone, kind = name_of(instance), instance["Placement"]["AvailabilityZone"], instance["InstanceType"]
    arch = ARCHITECTURES[shape["ProcessorInfo"]["SupportedArchitectures"][0]]
    capacity, allocatable = resources(shape, settings)
    taints = [*(taint for taint in settings.taints if taint["key"] != NOT_READY["key"]), NOT_READY]
    # Kubelets and cloud controllers still set the deprecated labels, too.
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
    addresses = [("InternalIP", instance.get("PrivateIpAddress")), ("InternalDNS", name), ("Hostname", name)]
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
                "osImage": f"simulated by Stowage's e2e tools ({instance.get('ImageId', 'no image')})",
                "kernelVersion": "6.12.0",
                "kubeletVersion": version,
                "kubeProxyVersion": version,
                "containerRuntimeVersion": "containerd://2.1.0",
                "machineID": instance["InstanceId"].removeprefix("i-"),
                "systemUUID": instance["InstanceId"],
                "bootID": instance["InstanceId"],
            },
        },
    }
