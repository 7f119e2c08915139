#!/usr/bin/env python3
"""Make the embedded catalogue from the full one.

    compact.py FULL.json [DESCRIBED.json.gz] > ec2-us-east-1.json

FULL.json is what `--catalog` takes: provenance fields next to `instanceTypes`, a list of objects. The output holds the same
facts: `columns` names the fields once, each of `rows` is one instance type, and lists that many types share (zones, usage classes,
architectures) stand once in `shared`, rows holding their index. `src/cloud/catalog/embedded.rs` reads it.

DESCRIBED.json.gz is EC2's DescribeInstanceTypes by name, as the PyPI package moto records it
(`moto/ec2/resources/instance_types.json.gz`). What FULL.json lacks comes from it: encryption in transit, Nitro Enclaves, the
interfaces of the default network card of types that have several cards, and which types are EBS-optimized only when asked (for
them no bandwidth to EBS is promised).
"""
import gzip
import json
import sys

SHARED = ["arch", "usageClasses", "zones"]


def add(entry, described):
    """The entry with what EC2 describes beyond it; the card last, since few types need that column."""
    network = described["NetworkInfo"]
    facts = {
        "encryptionInTransit": network.get("EncryptionInTransitSupported", False),
        "nitroEnclaves": described.get("NitroEnclavesSupport") == "supported",
    }
    more = {}
    for key, value in entry.items():
        more[key] = value
        if key == "ebsMbps" and described["EbsInfo"]["EbsOptimizedSupport"] != "default":
            more[key] = None
        if key == "efa":
            more |= facts
    card = network["NetworkCards"][network.get("DefaultNetworkCardIndex", 0)]["MaximumNetworkInterfaces"]
    return more | ({"defaultCardEnis": card} if card != entry["enis"] else {})


def main():
    with open(sys.argv[1]) as file:
        full = json.load(file)
    types = sorted(full["instanceTypes"], key=lambda entry: entry["name"])
    if len(sys.argv) > 2:
        with gzip.open(sys.argv[2]) as file:
            described = json.load(file)
        types = [add(entry, described[entry["name"]]) for entry in types]
    columns = []
    for entry in types:
        columns += [key for key in entry if key not in columns and key != "defaultCardEnis"]
    columns += ["defaultCardEnis"] if any("defaultCardEnis" in entry for entry in types) else []
    shared = {key: sorted({json.dumps(entry[key]) for entry in types}) for key in SHARED}

    def cell(entry, key):
        value = entry.get(key)
        if key in SHARED:
            return shared[key].index(json.dumps(value))
        return value

    def row(entry):
        cells = [cell(entry, key) for key in columns]
        while cells and cells[-1] is None:
            cells.pop()
        return json.dumps(cells, separators=(",", ":"))

    head = {key: value for key, value in full.items() if key != "instanceTypes"}
    head["shared"] = {key: [json.loads(text) for text in texts] for key, texts in shared.items()}
    head["columns"] = columns
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join(f"  {row(entry)}" for entry in types)
    print("{\n" + "\n".join(lines) + '\n "rows": [\n' + rows + "\n ]\n}")


if __name__ == "__main__":
    main()
