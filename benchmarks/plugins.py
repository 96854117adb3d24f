"""Train one uneven data set in other trainers, as they are and with balancing switched on."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import say

ROOT = Path(__file__).parents[1]
HOSTS = ("transformers", "buckets", "megatron", "lightning", "nemo", "swift")
HOSTS += ("torchtitan", "torchtitan_long")
_HERE = ("transformers", "buckets", "megatron")  # need nothing that the developer's venv has not


def plugins(*, rounds: int = 5, quick: bool = False) -> dict[str, Any]:
    """Measure seconds of training on two ranks, without and with, in turns, in each trainer.

    Half an hour. Each trainer runs in the environment that `make plugins` made for it, and is
    left out where there is none. `plugin_hosts.py` has the data, the model and the loops.
    """
    results: dict[str, Any] = {"ranks": 2, "rounds": 1 if quick else rounds}
    for host in HOSTS:
        python = Path(sys.executable)
        if host not in _HERE:
            python = ROOT / ".venv-plugins" / host.removesuffix("_long") / "bin/python"
        if not python.exists():
            print(f"{host}: left out, there is no {python}")
            continue
        runs = [
            {way: _seconds(python, host, way, quick) for way in ("plain", "balanced")}
            for _ in range(results["rounds"])
        ]
        gains = [run["plain"] / run["balanced"] for run in runs]
        results[host] = {
            "gain": statistics.median(gains),
            "gains": gains,
            "plain_s": [run["plain"] for run in runs],
            "balanced_s": [run["balanced"] for run in runs],
        }
        say(
            f"{host}: {statistics.median(gains):.2f}x as fast, {min(gains):.2f} to {max(gains):.2f}"
        )
    return results


def _seconds(python: Path, host: str, way: str, quick: bool) -> float:
    """Return the seconds of training in a trainer, which measures them itself."""
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    own |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with tempfile.TemporaryDirectory() as folder:
        program = ["-m", "plugin_hosts", host, way, "1" if quick else "3"]
        done = subprocess.run(
            [*command, *program], env=os.environ | own, cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stderr)
        return float(json.loads(Path(folder, "seconds.json").read_text()))
