"""The files of `examples/slurm` on two nodes of Slurm: stopped, queued again, equal to one process.

`make slurm` installs Slurm and runs it. Both nodes are on this machine, and listen on loopback; the
configuration is in a temporary folder. A Slurm without keys is for tests alone: whoever reaches its
ports may run programs.
"""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
import torch
from PIL import Image

from bascule.generate.tiny import TINY
from tests.helpers.serving import pipeline_of, values_of

pytestmark = pytest.mark.stress

ROOT = Path(__file__).parents[2]
DAEMONS = ("slurmctld", "slurmd")
NODES = ("127.0.0.1", "127.0.0.2")  # names that each machine can look up
# Processes are found by their parents, as cgroups find them: a signal reaches all, also the ranks.
CONFIG = """\
ClusterName=bascule
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
ReturnToService=2
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 Gres=gpu:1
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 Gres=gpu:1
PreemptType=preempt/partition_prio
PreemptMode=requeue
SlurmctldParameters=preempt_send_user_signal
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL State=UP PriorityTier=2
"""
STEPS, SAVE_EVERY = 200, 50
PIXEL = 1.001 / 255
KEY = "a key of the tests, long enough"


@dataclass(frozen=True)
class Cluster:
    """A Slurm that runs."""

    folder: Path
    environment: dict[str, str]

    def call(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, name: str, *arguments: str, options: Sequence[str] = (), **more: str) -> "Job":
        """A job of an example on both nodes, as a user submits it."""
        words = ["sbatch", "--parsable", "--nodes=2", "--gpus-per-node=1", *options]
        words += [f"--output={self.folder}/%x-%j.log", f"examples/slurm/{name}.sbatch", *arguments]
        environment = self.environment | {"INTERFACE": "lo"} | more
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        return Job(self, job, self.folder / f"bascule-{name}-{job}.log")


@dataclass(frozen=True)
class Job:
    """A job of the cluster."""

    cluster: Cluster
    id: str
    log: Path

    @property
    def lives(self) -> list[str]:
        """What it has printed since each start."""
        text = self.log.read_text() if self.log.exists() else ""
        return re.split(r"^.*: start \d+ of job .*\n", text, flags=re.MULTILINE)[1:]

    @property
    def state(self) -> str:
        shown = self.cluster.call("scontrol", "show", "job", "--oneliner", self.id)
        return re.findall(r" JobState=(\w+)", shown)[0]

    def until(self, condition: Callable[[], Any], timeout_s: float = 150.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            state = self.state
            if state in ("FAILED", "TIMEOUT", "NODE_FAIL") or time.monotonic() > end:
                raise AssertionError(f"{state}: {self.log.read_text()}")
            time.sleep(0.2)


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def end_all(mark: bytes) -> None:
    """Kill whatever a cluster has started: all of it inherits the name of its configuration."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of one GPU by name, which this machine need not have."""
    if None in map(shutil.which, DAEMONS) or os.geteuid() != 0:
        pytest.skip("NOT RUN: needs Slurm and root: make slurm")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", *NODES):
        (folder / name).mkdir()
    path, host = folder / "slurm.conf", os.uname().nodename
    path.write_text(CONFIG.format(host=host, ports=free_ports(3), folder=folder, nodes=NODES))
    variables = {"SLURM_CONF": str(path), "OMP_NUM_THREADS": "1"}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = Cluster(folder, os.environ | variables)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemons = [subprocess.Popen(words, env=made.environment, **quiet) for words in commands]
    try:
        end = time.monotonic() + 60
        while True:
            with suppress(AssertionError):
                if made.call("sinfo", "--noheader", "--format=%t %D") == "idle 2":
                    break
            assert time.monotonic() < end, [log.read_text() for log in folder.glob("*.log")]
            time.sleep(0.2)
        yield made
    finally:
        for daemon in daemons:
            daemon.terminate()
        with suppress(subprocess.TimeoutExpired):
            for daemon in daemons:
                daemon.wait(timeout=10)
        end_all(f"SLURM_CONF={path}".encode())
        for daemon in daemons:
            daemon.wait()


def losses_of(life: str) -> dict[int, float]:
    """Loss of each step, by its number."""
    lines = re.findall(r"step (\d+): loss (\S+)\n", life)
    return {int(number): float(loss) for number, loss in lines}


def test_training_goes_on_after_a_limit_a_preemption_and_a_cancel(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = ["examples/train_resumable.py", "--dtype", "float64"]
    script += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--out"]
    words = ["torchrun", "--standalone", *script, str(tmp_path / "alone")]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    shared = [*script, str(tmp_path / "shared")]
    with subprocess.Popen(words, cwd=ROOT, env=cluster.environment, **pipe) as alone:
        job = cluster.submit("train", *shared)

        def until_in_life(number: int) -> None:
            job.until(lambda: len(job.lives) == number and len(losses_of(job.lives[-1])) > 5)

        until_in_life(1)
        cluster.call("scancel", "--batch", "--signal=USR1", job.id)  # as Slurm before the limit
        until_in_life(2)
        cluster.call("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=true")
        until_in_life(3)
        cluster.call("scancel", job.id)  # the ranks have 30 s, if srun lets them
        last = cluster.submit("train", *shared)
        last.until(lambda: last.state == "COMPLETED")
        wanted = losses_of(alone.communicate()[0])

    assert job.state == "CANCELLED"
    lives = [losses_of(life) for life in (*job.lives, *last.lives)]
    assert [len(life) > 5 for life in lives] == [True] * 4
    assert min(lives[1]) == max(lives[0]) + 1 and min(lives[2]) == max(lives[1]) + 1
    assert max(lives[1]) < min(lives[3]) <= max(lives[2]) + 1  # it may repeat some
    assert set().union(*lives) == wanted.keys() == set(range(1, STEPS + 1))
    assert wanted[STEPS] < 0.8 * wanted[1]
    for life in lives:
        assert life == pytest.approx({number: wanted[number] for number in life}, rel=1e-9)


def test_bench_compares_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """With the losses of two ranks that the command starts itself, which see the same data."""
    words = ["-m", "bascule", "bench", "--data", "g2b4i128f1s0", "--steps", "3", "--out"]
    job = cluster.submit("train", *words, str(tmp_path / "nodes"))
    job.until(lambda: job.state == "COMPLETED")
    alone = [sys.executable, *words, str(tmp_path / "alone"), "--ranks", "2"]
    subprocess.run(alone, cwd=ROOT, env=cluster.environment, check=True, stdout=subprocess.DEVNULL)
    losses = list[list[float]]()
    for name in ("nodes", "alone"):
        setting = json.loads((tmp_path / name / "summary.json").read_text())["setting"]
        assert setting["world_size"] == 2
        rows = map(json.loads, (tmp_path / name / "steps.jsonl").read_text().splitlines())
        losses.append([row[f"loss_{arm}"] for row in rows for arm in ("unbalanced", "balanced")])
    assert len(losses[0]) >= 6 and losses[0] == pytest.approx(losses[1], rel=1e-4)


def apart(image: Image.Image, **settings: Any) -> float:
    """The largest difference of an image from that of the pipeline alone, of 0 to 1."""
    generator = torch.Generator().manual_seed(settings.pop("seed"))
    steps = settings.pop("steps")
    (wanted,) = pipeline_of(TINY)(
        **settings, num_inference_steps=steps, generator=generator, return_dict=False
    )[0]
    return float((values_of(image) - values_of(wanted)).abs().max())


def settings_of(seed: int) -> dict[str, Any]:
    return {"prompt": f"boat {seed}", "steps": 150, "seed": seed}


def test_a_server_stops_at_its_limit_and_goes_on_with_its_requests(
    cluster: Cluster, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    job = cluster.submit(
        "serve",
        *("--model", TINY, "--port", "0", "--spool", str(tmp_path / "spool")),
        options=["--signal=B:USR1@10"],
        API_KEY_FILE=str(key),
    )

    def client_of(life: int, key: str = KEY) -> openai.OpenAI:
        address = re.compile(r" at (http://\S+), requests in ")
        job.until(lambda: len(job.lives) > life and address.search(job.lives[life]))
        url = address.findall(job.lives[life])[0]
        return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)

    def status(request_id: str) -> dict[str, Any]:
        answer: Any = client.get(f"/requests/{request_id}", cast_to=object)
        return answer

    client, seeds, open_ids = client_of(0), dict[str, int](), list[str]()
    with pytest.raises(openai.AuthenticationError):
        client_of(0, "another key").models.list()
    # Slurm looks each half minute for jobs that need their signal in the next.
    cluster.call("scontrol", "update", f"JobId={job.id}", "EndTime=now+50")
    with suppress(openai.APIConnectionError, openai.InternalServerError):  # 503 as it ends
        while len(job.lives) == 1:  # until the limit there are requests in it
            open_ids = [one for one in seeds if status(one)["state"] != "done"]
            if len(open_ids) < 3:
                body = {**settings_of(len(seeds)), "size": "128x128"}
                answer: Any = client.post("/requests", body=body, cast_to=object)
                seeds[answer["data"][0]["id"]] = len(seeds)
            time.sleep(0.05)
    assert open_ids
    job.until(lambda: len(job.lives) == 2)
    cluster.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=30")
    client = client_of(1)
    job.until(lambda: all(status(one)["state"] == "done" for one in seeds))
    for request_id in (next(iter(seeds)), *open_ids):
        url = f"{client.base_url}requests/{request_id}/content"
        with urlopen(Request(url, headers={"Authorization": f"Bearer {KEY}"})) as content:
            image = Image.open(io.BytesIO(content.read()))
        assert apart(image, **settings_of(seeds[request_id]), width=128, height=128) <= PIXEL
    assert "goes on from its saved state" in job.lives[1]
    cluster.call("scancel", "--signal=TERM", job.id)
    job.until(lambda: job.state == "COMPLETED")


def test_outputs_that_a_requeue_left_out_are_made(cluster: Cluster, tmp_path: Path) -> None:
    sizes = [{"width": 128, "height": 64 + 64 * (seed % 2), "steps": 100} for seed in range(6)]
    prompts = [settings_of(seed) | size for seed, size in enumerate(sizes)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    arguments = ["--model", TINY, "--prompts", str(tmp_path / "prompts.jsonl")]
    job = cluster.submit("generate", *arguments, "--out", str(tmp_path / "images"))

    def made() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("images/*.png")}

    job.until(made)
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    job.until(lambda: len(job.lives) == 2)
    before = made()
    job.until(lambda: job.state == "COMPLETED")
    after = made()
    assert 0 < len(before) < len(after) == len(prompts)
    assert before.items() <= after.items()  # none is made again
    for name, settings in zip(sorted(after), prompts, strict=True):
        assert apart(Image.open(tmp_path / "images" / name), **settings) <= PIXEL
