"""Recordings of the requests that a run of the service makes: normalization and comparison. wire_record.py makes the recordings.

An entry of a recording is a dictionary:

    to       "aws" or "kubernetes"
    kind     "write"     content and number of equal requests are compared
             "repeated"  content is compared; the number depends on timing (polls, renewals, dry runs, status patches)
    what     the operation, such as "ec2 CreateFleet" or "patch nodeclaims/status"
    content  parameters, or path and body
    status   HTTP status, except of reads
    count    number of equal requests of kind "write"

Normalization replaces values that differ from run to run: `Names` maps the random names and ids of one run to aliases that are equal in
all runs, such as `i-0123…` to `<instance general/workload/us-east-1a>`.
"""

import base64
import binascii
import json
import re

UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
MILLISECONDS = re.compile(r"\b1[6-9]\d{11}\b")  # since the epoch
AWS_ID = re.compile(r"\b(i|lt|fleet|eni|vol|sir|vpc|subnet|sg|eipassoc)-[0-9a-f]{8,}\b")
# Members whose values are random in each run and identify no object.
OPAQUE = {
    "ClientToken": "<token>",
    "NextToken": "<token>",
    "continue": "<token>",
    "ReceiptHandle": "<receipt>",
    "resourceVersion": "<version>",
    "holderIdentity": "<replica>",
}
IDS = ("InstanceId", "ResourceId")
MESSAGES = ("note", "message")  # members of Events and of conditions


class Names:
    """Aliases of the names, ids and URLs of one run."""

    def __init__(self):
        self.aliases = {}
        self.pattern = None

    def add(self, name, alias):
        """Gives a literal text an alias. Text that is empty or absent is ignored."""
        if name:
            self.aliases[name] = alias
            self.pattern = None

    def text(self, text):
        """A text with aliases in place of names, ids and times."""
        if self.pattern is None:
            longest_first = sorted(self.aliases, key=len, reverse=True)
            self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        text = self.pattern.sub(lambda found: self.aliases[found[0]], text)
        text = TIME.sub("<time>", text)
        text = MILLISECONDS.sub("<time>", text)
        text = UUID.sub("<uid>", text)
        return AWS_ID.sub(lambda found: f"<{found[1]}>", text)

    def value(self, value, name=None):
        """A JSON value with aliases in all keys and texts."""
        if name in OPAQUE and value:
            return OPAQUE[name]
        if name == "UserData" and isinstance(value, str):
            return self.user_data(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner) for inner in value]
        if isinstance(value, str):
            return self.json_text(value)
        if isinstance(value, int) and MILLISECONDS.fullmatch(str(value)):
            return "<time>"
        return value

    def json_text(self, text):
        """A text; JSON inside a text, as in annotations, is normalized by its members."""
        if text[:1] in ("{", "["):
            try:
                inner = json.loads(text)
            except ValueError:
                return self.text(text)
            return {"json": self.value(inner)}
        return self.text(text)

    def user_data(self, text):
        """User data by lines."""
        try:
            decoded = base64.b64decode(text, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return self.text(text)
        return self.text(decoded).split("\n")


# Parameters of AWS's query protocols


def tree(form):
    """Nested dictionaries and lists of a flat form: `Filter.1.Name` is a member of the first item of the list `Filter`."""
    root = {}
    for name, value in form.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return listed(root)


def listed(value):
    """The same with a list in place of each dictionary whose keys are 1, 2, 3, …"""
    if not isinstance(value, dict):
        return value
    value = {key: listed(inner) for key, inner in value.items()}
    if value and all(key.isdigit() for key in value):
        return [value[key] for key in sorted(value, key=int)]
    return value


def split_by_id(parameters):
    """One request per instance of a request that names several: the number of instances per request depends on timing."""
    for name in IDS:
        ids = parameters.get(name)
        if isinstance(ids, list):
            return [{**parameters, name: [id]} for id in ids]
    for number, entry in enumerate(parameters.get("Filter") or []):
        if entry.get("Name") == "instance-id":
            filters = parameters["Filter"]
            return [{**parameters, "Filter": [*filters[:number], {**entry, "Value": [id]}, *filters[number + 1 :]]} for id in entry["Value"]]
    return [parameters]


def without_order(parameters):
    """Parameters with sorted filters and tags: their order has no meaning."""
    if isinstance(parameters, dict):
        out = {key: without_order(value) for key, value in parameters.items()}
        for key in ("Filter", "Tag", "Tags"):
            if isinstance(out.get(key), list):
                out[key] = sorted(out[key], key=canonical)
        return out
    return [without_order(value) for value in parameters] if isinstance(parameters, list) else parameters


# Status patches of Kubernetes


def parts_of_status(body):
    """The fields that a status patch writes: (field, value) for each leaf; a condition is one value.

    Changes that share one patch in one run may take two patches in another run, but the values are equal."""
    for name, value in body.get("status", {}).items():
        if name == "conditions":
            for condition in value:
                yield f"status.conditions[{condition['type']}]", condition
        else:
            yield from leaves(value, f"status.{name}").items()
    for name, value in body.items():
        if name not in ("status", "apiVersion", "kind"):
            yield from leaves(value, name).items()


def shape_of_status(body):
    """The members of a status patch: the preconditions in its metadata, and the members of the status."""
    return {"metadata": sorted(body.get("metadata", {})), "status": sorted(body.get("status", {}))}


# Entries


def canonical(value):
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def key_of(entry):
    """Key of an entry: equal for entries that differ in their counts only."""
    return canonical({name: value for name, value in entry.items() if name != "count"})


def counted(entries):
    """Distinct entries with counts, in an order that does not depend on timing. Only writes have counts."""
    found = {}
    for entry in entries:
        known = found.setdefault(key_of(entry), {**entry, "count": 0})
        known["count"] += 1
    for entry in found.values():
        if entry["kind"] != "write":
            del entry["count"]
    order = lambda entry: (entry["to"], entry["what"], key_of(entry))
    return sorted(found.values(), key=order)


def without_messages(entries):
    """Entries without messages for people, which are the notes of Events and the messages of conditions. Their reasons remain."""
    out = {}
    for entry in entries:
        if entry["to"] == "kubernetes":
            entry = {**entry, "content": stripped(entry["content"])}
        known = out.setdefault(key_of(entry), entry)
        if known is not entry and "count" in entry:
            out[key_of(entry)] = {**known, "count": known["count"] + entry["count"]}
    return list(out.values())


def stripped(value):
    if isinstance(value, dict):
        return {name: stripped(inner) for name, inner in value.items() if name not in MESSAGES}
    return [stripped(inner) for inner in value] if isinstance(value, list) else value


def leaves(value, at=""):
    """The values of a JSON value by path."""
    if isinstance(value, dict) and value:
        return {path: leaf for key, inner in value.items() for path, leaf in leaves(inner, f"{at}.{key}" if at else key).items()}
    if isinstance(value, list) and value:
        return {path: leaf for index, inner in enumerate(value) for path, leaf in leaves(inner, f"{at}[{index}]").items()}
    return {at: value}


def differences(old, new):
    """The paths at which two entries differ, with both values."""
    before, after = ({**leaves(entry["content"], "content"), "status": entry.get("status")} for entry in (old, new))
    return {path: (before.get(path, "absent"), after.get(path, "absent")) for path in [*before, *after] if before.get(path, "absent") != after.get(path, "absent")}


def compare(old, new):
    """Differences between the entries of two recordings: a list of texts, empty if they are equal."""
    before, after = ({key_of(entry): entry for entry in entries} for entries in (old, new))
    out = []
    for key in before.keys() & after.keys():
        counts = before[key].get("count"), after[key].get("count")
        if counts[0] != counts[1]:
            out.append(f"{label(before[key])}: {counts[0]} times in A, {counts[1]} times in B: {canonical(before[key]['content'])[:600]}")
    gone = {key: before[key] for key in before.keys() - after.keys()}
    added = {key: after[key] for key in after.keys() - before.keys()}
    # Pair each entry of A with the most similar entry of B, to report a change as a change.
    pairs = sorted(
        (len(differences(one, other)), key, match)
        for key, one in gone.items()
        for match, other in added.items()
        if label(one) == label(other)
    )
    for _, key, match in pairs:
        if key in gone and match in added:
            lines = [f"{label(gone[key])} differs:"]
            for path, (a, b) in list(differences(gone.pop(key), added.pop(match)).items())[:20]:
                lines.append(f"    {path}\n      A: {canonical(a)[:600]}\n      B: {canonical(b)[:600]}")
            out.append("\n".join(lines))
    for side, entries in (("A", gone), ("B", added)):
        for entry in entries.values():
            out.append(f"{label(entry)} only in {side}: {canonical({k: entry[k] for k in ('status', 'count', 'content') if k in entry})[:2000]}")
    return sorted(out)


def label(entry):
    return f"{entry['to']} {entry['kind']} {entry['what']}"
