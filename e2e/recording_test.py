"""Normalization and comparison of recordings, without a control plane."""

import base64
import copy
import json

import recording
import wire_record


def run(suffix, number, polls=3):
    """The raw recording of a small run, with the names and ids of this run, and their aliases."""
    claim, instance, template = f"general-{suffix}", f"i-{number:017x}", f"karpenter.k8s.aws/{number}"
    names = recording.Names()
    names.add(claim, "<claim general>")
    names.add(instance, "<instance general>")

    def ec2(action, body="", **form):
        call = {"service": "ec2", "method": "POST", "path": "/", "action": action, "form": {"Action": action, "Version": "1", **form}}
        return {**call, "body": body, "target": None, "status": 200, "answer": f"<launchTemplateId>lt-{number:017x}</launchTemplateId>"}

    data = base64.b64encode(f"cluster: demo\nnode: {claim}\n".encode()).decode()
    fleet = {"ClientToken": f"token-{number}", "TagSpecification.1.ResourceType": "instance", "TagSpecification.1.Tag.1.Key": "team", "TagSpecification.1.Tag.1.Value": "a"}
    tag = {"ResourceId.1": instance, "Tag.1.Key": "karpenter.sh/nodeclaim", "Tag.1.Value": claim}
    calls = [
        ec2("CreateLaunchTemplate", LaunchTemplateName=template, **{"LaunchTemplateData.UserData": data}),
        ec2("CreateFleet", **{**fleet, "LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName": template}),
        ec2("CreateTags", **tag),
        *[ec2("DescribeInstances", **{"Filter.1.Name": "instance-id", "Filter.1.Value.1": instance})] * polls,
        {**ec2(""), "form": {}, "service": "sqs", "action": "DeleteMessage", "target": "AmazonSQS.DeleteMessage", "body": json.dumps({"QueueUrl": "q", "ReceiptHandle": suffix})},
    ]

    def request(verb, path, body=None, subresource=None):
        about = {"resource": path.split("/")[-2] if body else path.split("/")[-1].partition("?")[0], "subresource": subresource}
        return {"verb": verb, "requestURI": path, "objectRef": about, "stage": "ResponseComplete", "requestObject": body, "responseStatus": {"code": 200}}

    at = f"2026-11-22T17:00:{number % 60:02d}.5Z"
    metadata = {"resourceVersion": str(number), "annotations": {"planned-pods": json.dumps([claim]), "at": at}}
    events = [
        request("list", f"/api/v1/pods?resourceVersion={number}"),
        request("patch", f"/apis/karpenter.sh/v1/nodeclaims/{claim}", {"metadata": metadata}),
        *[request("update", "/apis/coordination.k8s.io/v1/leases/leader", {"spec": {"renewTime": at}})] * polls,
    ]
    return {"aws": calls, "kubernetes": events, "steps": [[0.0, "all"]]}, names


def entries(*arguments, change=lambda raw: None, **named):
    raw, names = run(*arguments, **named)
    change(raw)
    return wire_record.normalized(raw, names)


def assert_differs(change, *expected):
    """A change of the raw requests is reported as one difference that contains these texts."""
    found = recording.compare(entries("abcde", 7), entries("fghij", 8, change=change))
    assert len(found) == 1, found
    for text in expected:
        assert text in found[0]


class TestComparison:
    def test_runs_with_other_names_times_orders_and_numbers_of_polls_are_equal(self):
        def reverse(raw):
            raw["aws"].reverse()
            raw["kubernetes"].reverse()

        assert recording.compare(entries("abcde", 7), entries("fghij", 8, polls=9, change=reverse)) == []

    def test_a_changed_tag_of_a_fleet_is_reported(self):
        def change(raw):
            raw["aws"][1]["form"]["TagSpecification.1.Tag.1.Value"] = "b"

        assert_differs(change, "CreateFleet", "TagSpecification[0].Tag[0].Value", '"a"', '"b"')

    def test_a_changed_annotation_is_reported(self):
        def change(raw):
            raw["kubernetes"][1]["requestObject"]["metadata"]["annotations"]["planned-pods"] = "[]"

        assert_differs(change, "patch nodeclaims", "planned-pods", "<claim general>")

    def test_changed_user_data_are_reported_by_line_though_the_name_of_the_template_is_a_hash(self):
        def change(raw):
            raw["aws"][0]["form"]["LaunchTemplateData.UserData"] = base64.b64encode(b"cluster: other\nnode: general-fghij\n").decode()

        assert_differs(change, "CreateLaunchTemplate", "UserData[0]", "cluster: other")

    def test_a_tag_with_the_name_of_another_claim_is_reported(self):
        def change(raw):
            raw["aws"][2]["form"]["Tag.1.Value"] = "general-other"

        assert_differs(change, "CreateTags", "<claim general>", "general-other")

    def test_a_write_that_is_made_twice_is_reported(self):
        assert_differs(lambda raw: raw["aws"].append(raw["aws"][2]), "CreateTags", "1 times in A, 2 times in B")

    def test_a_write_that_is_missing_is_reported(self):
        assert_differs(lambda raw: raw["aws"].pop(), "DeleteMessage", "only in A")

    def test_a_write_that_is_refused_is_reported(self):
        def change(raw):
            raw["kubernetes"][1]["responseStatus"]["code"] = 403

        assert_differs(change, "patch nodeclaims", "200", "403")

    def test_other_parameters_of_a_read_are_reported(self):
        def change(raw):
            for call in raw["aws"][3:6]:
                call["form"]["MaxResults"] = "5"

        assert_differs(change, "DescribeInstances", "MaxResults")

    def test_another_selector_of_a_watch_is_reported(self):
        def change(raw):
            raw["kubernetes"][0]["requestURI"] += "&labelSelector=a"

        assert_differs(change, "list pods", "labelSelector")

    def test_the_field_of_a_lease_is_compared_though_its_renewals_are_not_counted(self):
        def change(raw):
            for event in raw["kubernetes"][2:]:
                event["requestObject"] = {"spec": {"renewTime": "soon"}}

        assert_differs(change, "update leases", "<time>", "soon")

    def test_messages_can_be_ignored_but_not_reasons(self):
        def event(reason, note):
            content = {"path": "/events", "body": {"reason": reason, "note": note}}
            return {"to": "kubernetes", "kind": "write", "what": "create events", "content": content, "status": 201, "count": 1}

        compare = lambda *both: recording.compare(*map(recording.without_messages, both))
        assert compare([event("Launched", "one text"), event("Launched", "two")], [{**event("Launched", "text"), "count": 2}]) == []
        assert len(compare([event("Launched", "text")], [event("Disrupted", "text")])) == 1
        assert len(compare([event("Launched", "text")], [{**event("Launched", "text"), "count": 2}])) == 1
        tagged = {"to": "aws", "kind": "write", "what": "ec2 CreateTags", "content": {"message": "a"}, "status": 200, "count": 1}
        assert len(compare([tagged], [{**tagged, "content": {"message": "b"}}])) == 1


class TestParameters:
    def test_a_form_is_a_tree(self):
        form = {"Filter.2.Name": "b", "Filter.1.Name": "a", "Filter.1.Value.1": "x", "MaxResults": "5"}
        assert recording.tree(form) == {"Filter": [{"Name": "a", "Value": ["x"]}, {"Name": "b"}], "MaxResults": "5"}

    def test_requests_of_several_instances_are_as_many_requests(self):
        assert recording.split_by_id({"InstanceId": ["i-1", "i-2"]}) == [{"InstanceId": ["i-1"]}, {"InstanceId": ["i-2"]}]
        filters = {"Filter": [{"Name": "vpc", "Value": ["v"]}, {"Name": "instance-id", "Value": ["i-1", "i-2"]}]}
        split = recording.split_by_id(copy.deepcopy(filters))
        assert [entry["Filter"][1]["Value"] for entry in split] == [["i-1"], ["i-2"]]
        assert recording.split_by_id({"MaxResults": "5"}) == [{"MaxResults": "5"}]
