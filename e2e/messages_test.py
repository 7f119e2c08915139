"""The source of the service has the log messages of messages.py, with their fields."""

import functools
import re

import pytest

import harness
import messages

CALL = re.compile(r'\b(?:trace|debug|info|warn|error)!\(([^;]*?)"((?:[^"\\]|\\.)*)"\s*\)', re.DOTALL)


@functools.cache
def source():
    """Every source file without its tests."""
    files = (file for file in sorted((harness.ROOT / "src").rglob("*.rs")) if not file.stem.endswith("tests") and "tests" not in file.parts)
    return "\n".join(file.read_text().partition("#[cfg(test)]")[0] for file in files)


@pytest.mark.parametrize("message", messages.FIELDS)
def test_a_log_call_has_the_message_and_its_fields(message):
    calls = [fields for fields, text in CALL.findall(source()) if text == message]
    assert len(calls) == 1, f"{len(calls)} log calls have the message {message!r}"
    for field in messages.FIELDS[message]:
        assert re.search(rf"(^|[\s,%?]){field}\s*[,=]", calls[0]), f"{message!r} has no field {field}"


@pytest.mark.parametrize("part", [f'"{messages.LEASE_LOST}', messages.OTHER_LEADER, f'"{messages.OTHER_LEADER_WAIT}"'])
def test_the_messages_about_leases_are_in_the_source(part):
    assert source().count(part) == 1
