#!/usr/bin/env python3
"""Cleans up after a test run that was killed.

`guarded_directory()` is a temporary directory for everything that a run starts and writes. This file also runs as a separate process:
when the run ends without cleaning up (SIGKILL included), or when the `make` that started it ends, the process stops every process
recorded in `DIR/**/pids/*.pid` and removes the directory. Environment: STOWAGE_MAKE_PID is the process id of the outermost `make`.
"""

import contextlib
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile

from processes import stop

MAKE_PID = "STOWAGE_MAKE_PID"
MEMORY = "/dev/shm"
MEMORY_NEEDED = 6 << 30  # bytes; a suite writes a few hundred MiB, and five run at once
TEARDOWN_TIMEOUT = 60.0  # seconds between SIGTERM and SIGKILL for a run whose `make` ended


def in_memory():
    """The file system in memory if it has room: there no control plane waits for a disk that others keep busy. None otherwise."""
    try:
        usage = os.statvfs(MEMORY)
    except OSError:
        return None
    roomy = usage.f_bavail * usage.f_frsize >= MEMORY_NEEDED
    return MEMORY if roomy and os.access(MEMORY, os.W_OK | os.X_OK) else None


@contextlib.contextmanager
def guarded_directory():
    """A directory that is the default of `tempfile` until the end of the block; nothing in it outlives this process."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="stowage-e2e-", dir=in_memory())).resolve()
    watched = [str(os.getpid()), *([os.environ[MAKE_PID]] if os.environ.get(MAKE_PID) else [])]
    process = subprocess.Popen(
        [sys.executable, __file__, directory, *watched],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        # A signal to the process group of the run must not reach the guard.
        start_new_session=True,
    )
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    try:
        yield directory
    finally:
        tempfile.tempdir = before
        clean(directory)
        process.kill()
        process.wait()


def clean(directory):
    """Stops the recorded processes and removes the directory. A control plane that is still starting records more of them meanwhile."""
    while records := sorted(directory.rglob("pids/*.pid")):
        stop(records)
    shutil.rmtree(directory, ignore_errors=True)


def open_pid(pid):
    """A pidfd, or None if there is no such process."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def main():
    directory, *pids = sys.argv[1:]
    descriptors = [open_pid(int(pid)) for pid in pids]
    run = descriptors[0]
    if all(descriptor is not None for descriptor in descriptors):
        select.select(descriptors, [], [])
    if run is not None and not select.select([run], [], [], 0)[0]:
        signal.pidfd_send_signal(run, signal.SIGTERM)
        if not select.select([run], [], [], TEARDOWN_TIMEOUT)[0]:
            signal.pidfd_send_signal(run, signal.SIGKILL)
            select.select([run], [], [])
    clean(pathlib.Path(directory))


if __name__ == "__main__":
    main()
