"""The server's manifest without Kubernetes: its command in two namespaces that have pods' names.

Each pod is a network namespace with a host name and a hosts file, as a headless Service would give
it. Needs root and iproute2.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.clusters import KUBERNETES, ROOT, served_by, words_of

PODS, PORT, KEY = ("images-0", "images-1"), "8000", "a key of clients, for tests"
NAMES = "127.0.0.1 localhost\n" + "".join(
    f"10.78.0.{number} {pod}.images-ranks {pod}\n" for number, pod in enumerate(PODS, 1)
)
ASK = """
import json, sys, urllib.request
method, path, body, key = sys.argv[1:]
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
url = f"http://127.0.0.1:8000{path}"
request = urllib.request.Request(url, body.encode() or None, headers, method=method)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def network() -> Iterator[None]:
    """Namespaces with names of pods, joined by a link."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("NOT RUN: pods need root and iproute2")
    folders = [Path("/etc/netns", pod) for pod in PODS]
    try:
        for pod, folder in zip(PODS, folders, strict=True):
            try:
                ip("netns", "add", pod)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"NOT RUN: no network namespaces here: {error.stderr.strip()}")
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(NAMES)
        link = ("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", PODS[1])
        ip("-n", PODS[0], *link)
        for number, pod in enumerate(PODS, 1):
            ip("-n", pod, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            for name in ("lo", "eth0"):
                ip("-n", pod, "link", "set", name, "up")
        yield
    finally:
        for pod, folder in zip(PODS, folders, strict=True):
            subprocess.run(["ip", "netns", "del", pod], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


class Pod:
    """A pod of the StatefulSet, whose container starts again when `start` is called again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder / name
        (self.folder / "key").mkdir(parents=True)
        (self.folder / "key" / "api-key").write_text(KEY)
        self.log = self.folder / "log"

    def start(self) -> None:
        """Start the manifest's command: a tiny model, one rank; mounts are folders of the test."""
        container = served_by(KUBERNETES / "serve.yaml")
        words = words_of(container, POD_INDEX=self.name[-1])
        changes = {
            "--nproc-per-node=8": "--nproc-per-node=1",
            "--model=/models/flux": "--model=tiny",
            "--api-key-file=/key/": f"--api-key-file={self.folder}/key/",
            "--spool=/spool/": f"--spool={self.folder}/spool/",
        }
        for before, after in changes.items():
            assert sum(before in word for word in words) == 1, before
            words = [word.replace(before, after) for word in words]
        variables = {entry["name"]: entry.get("value", self.name) for entry in container["env"]}
        words[0] = str(Path(sys.executable).with_name("torchrun"))
        inside = 'hostname "$POD_NAME" && exec "$@"'
        command = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", inside, "sh"]
        environment = os.environ | variables | {"OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, *words], cwd=ROOT, env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the pod."""
        command = ("ip", "netns", "exec", self.name, *words)
        environment = os.environ | {"POD_NAME": self.name}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def probe(self, kind: str) -> bool:
        words = served_by(KUBERNETES / "serve.yaml")["readinessProbe"]["exec"]["command"]
        assert words == ["python", "examples/kubernetes/healthy.py", "ready", PORT]
        script = str(KUBERNETES / "healthy.py")
        return self.run(sys.executable, script, kind, PORT).returncode == 0

    def ask(self, method: str, path: str, **body: object) -> Any:
        text = json.dumps(body) if body else ""
        answer = self.run(sys.executable, "-c", ASK, method, path, text, KEY)
        assert answer.returncode == 0, answer.stderr + self.log.read_text()[-3000:]
        return json.loads(answer.stdout)

    def kill(self) -> None:
        """End the launcher and its ranks at once; each rank has a group of its own."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in map(int, pids.stdout.split()):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(60)


def until(condition: Callable[[], bool], pods: list[Pod], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        logs = "\n".join(pod.log.read_text()[-3000:] for pod in pods)
        assert time.monotonic() < end, f"not within {seconds} s:\n{logs}"
        time.sleep(0.5)


@pytest.mark.nightly
def test_the_command_of_the_manifest_serves_from_two_pods(network: None, tmp_path: Path) -> None:
    """The first pod has the server; a pod that is gone comes back; a job that stops goes on."""
    pods = [Pod(name, tmp_path) for name in PODS]
    first, second = pods
    try:
        second.start()  # the names of others are there before they are ready
        assert not first.probe("live") and second.probe("ready")
        first.start()
        until(lambda: first.probe("ready"), pods)
        assert first.ask("GET", "/v1/requests")["num_ranks"] == 2
        made = first.ask("POST", "/v1/images/generations", prompt="a", size="64x64", steps=2)
        assert len(made["data"]) == 1
        long = {"prompt": "a", "size": "64x64", "steps": 200}
        ids = [first.ask("POST", "/v1/requests", **long, seed=k)["data"][0]["id"] for k in range(3)]

        def state(request: str) -> str:
            return first.ask("GET", f"/v1/requests/{request}")["state"]

        second.kill()
        second.start()  # as kubelet does, under the same name
        until(lambda: not first.probe("ready"), pods)
        until(lambda: first.probe("ready"), pods)
        assert first.ask("GET", "/v1/requests")["num_ranks"] == 2
        for pod in pods:  # the job is deleted
            pod.process.send_signal(signal.SIGTERM)
        for pod in pods:
            pod.process.wait(120)
        for pod in pods:
            pod.start()
        until(lambda: first.probe("ready"), pods)
        until(lambda: all(state(request) == "done" for request in ids), pods)
    finally:
        for pod in pods:
            pod.kill()
    assert (first.folder / "spool" / "requests" / "requests.sqlite").is_file()
