"""A Secret in a folder, as a kubelet mounts it: each file is a link through `..data`, and one rename of that link moves all files to a new
version. The old version is deleted at once."""

import base64
import contextlib
import os
import pathlib
import shutil
import tempfile
import threading
import time

from waiting import wait_until

PERIOD = 0.2  # seconds between two reads of the Secret; a kubelet takes up to a minute and a half
ATTEMPTS = 100  # of a reader to get all files of one version


class SecretVolume:
    """The mounted Secret, as a context manager. It is updated until the end of the block."""

    def __init__(self, api, namespace, name, folder):
        self.api, self.namespace, self.name, self.folder = api, namespace, name, pathlib.Path(folder)
        self.current = None
        self.versions = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.follow, daemon=True)

    def __enter__(self):
        self.folder.mkdir(parents=True)
        wait_until(self.update, 60, f"the Secret {self.namespace}/{self.name}", every=PERIOD)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()

    def follow(self):
        while not self.stopped.wait(PERIOD):
            # A pod keeps its files while the API server does not answer.
            with contextlib.suppress(Exception):
                self.update()

    def update(self):
        """Writes the current version of the Secret. False while it lacks certificate or key: cert-manager writes both at once."""
        secret = self.api.find("Secret", self.name, self.namespace) or {}
        files = {name: base64.b64decode(text) for name, text in secret.get("data", {}).items()}
        if not {"tls.crt", "tls.key"} <= files.keys():
            return False
        if files != self.current:
            self.write(files)
            self.current = files
            self.versions += 1
        return True

    def write(self, files):
        version = pathlib.Path(tempfile.mkdtemp(prefix="..", dir=self.folder))
        for name, content in files.items():
            (version / name).write_bytes(content)
        data, aside = self.folder / "..data", self.folder / "..data_tmp"
        previous = self.folder / os.readlink(data) if data.is_symlink() else None
        aside.symlink_to(version.name)
        aside.rename(data)
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        if previous:
            shutil.rmtree(previous)

    def read(self, *names):
        """The content of some files, all of one version."""
        data = self.folder / "..data"
        for _ in range(ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                version = os.readlink(data)
                content = [(self.folder / version / name).read_bytes() for name in names]
                if os.readlink(data) == version:
                    return content
            time.sleep(0.001)
        raise AssertionError(f"{self.folder} never held one version for the time of a read")
