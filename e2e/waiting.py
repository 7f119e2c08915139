"""Waiting for a condition that no watch reports. `observe.Mirror.wait` is for what watches report."""

import tenacity


class WaitTimeout(AssertionError):
    """A condition did not become true in time."""


def timeout_message(what, timeout, last):
    return f"{what}: not within {timeout:.0f} s; last state: {last()}"


def wait_until(predicate, timeout, what, last=None, every=0.05):
    """Polls until `predicate()` is true and returns its value. `last()` describes the state for the failure message; without it, the
    message has the last value of the predicate."""

    def timed_out(retry):
        raise WaitTimeout(timeout_message(what, timeout, last or (lambda: repr(retry.outcome.result()))))

    poll = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda value: not value),
        stop=tenacity.stop_after_delay(timeout),
        wait=tenacity.wait_fixed(every),
        retry_error_callback=timed_out,
    )
    return poll(predicate)
