"""Processes that outlive the command that started them: recorded in files, and stopped by these records only."""

import contextlib
import os
import pathlib
import select
import signal
import time

STOP_TIMEOUT = 3.0  # seconds between SIGTERM and SIGKILL


class Failure(Exception):
    """An error that a person can act on; the message is all that is printed."""


def start_time(pid):
    """When `pid` started, in clock ticks since boot, or None if no such process runs (a zombie does not run)."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything, so count the fields after its end.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def usage(pid):
    """CPU seconds and resident MiB of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    resident = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), resident * os.sysconf("SC_PAGE_SIZE") / 2**20


def write_pid(file, pid):
    """Record a process. Written aside and renamed, so that a reader never sees a partial record."""
    aside = file.with_suffix(".new")
    aside.write_text(f"{pid} {start_time(pid)}\n")
    aside.rename(file)


def open_process(file):
    """A pidfd of the process recorded in `file`, or None if that very process no longer runs."""
    try:
        pid, started = file.read_text().split()
        descriptor = os.pidfd_open(int(pid))
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    # The descriptor pins the process, so a start time compared after opening it cannot go stale.
    if start_time(int(pid)) == started:
        return descriptor
    os.close(descriptor)
    return None


def running(file):
    descriptor = open_process(file)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def stop(files, patience=STOP_TIMEOUT, first=signal.SIGTERM):
    """Stop the processes recorded in `files`: SIGTERM to all of them, SIGKILL to those that remain, then remove the files."""
    alive = {}
    for file in files:
        descriptor = open_process(file)
        if descriptor is not None:
            alive[descriptor] = file
    for number, wait in ((first, patience), (signal.SIGKILL, 30.0)):
        for descriptor in alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
        deadline = time.monotonic() + wait
        while alive and (left := deadline - time.monotonic()) > 0:
            for descriptor in select.select(list(alive), [], [], left)[0]:
                os.close(descriptor)
                del alive[descriptor]
    if alive:
        raise Failure(f"could not stop {', '.join(file.stem for file in alive.values())}: still running after SIGKILL")
    for file in files:
        file.unlink(missing_ok=True)
