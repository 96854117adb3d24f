"""Servers: latencies by two policies beside the simulator; ranks that are killed; memory."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request as Call
from urllib.request import urlopen

import numpy as np
import torch
from measuring import on_ranks, say
from published import Dispatch, qwen_h20

from bascule.generate.generating import load_pipeline
from bascule.generate.options import Prompt
from bascule.generate.tiny import TINY
from bascule.plan.requests import Balanced, Policy, Queue, Request, Starts, State
from bascule.serve.engine import Engine
from bascule.serve.options import ServeOptions
from bascule.serve.service import Service
from bascule.serve.spool import Spool
from bascule.serve.status import Status
from bascule.serve.times import Times
from bascule.sim.requests import serve

POLICIES: dict[str, Callable[[], Policy]] = {
    "least in flight": lambda: Dispatch("least in flight"),
    "balanced": Balanced,
}
FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda seconds: float(np.mean(seconds)),
    "P95": lambda seconds: float(np.percentile(seconds, 95)),
}
MOST_OVER_SIMULATED = {"mean": 1.05, "P95": 1.10}
LEAST_SHARED, LEAST_GAIN = 0.2, 1.1
SHARES = 0.5, 0.35, 0.15  # of the sizes, the smallest first
EMULATED_SPEED = 4.0  # times as fast as an H20
_TEXT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """Ranks, and a load that is the same for both policies.

    Attributes:
        num_ranks: Ranks of the server.
        sides: Pixels a side of the images.
        steps: Denoising steps of an image.
        load: Arriving work over what the ranks can do, with each request on one rank.
        is_emulated: The transformer's compute is a wait.
    """

    num_ranks: int
    sides: tuple[int, ...]
    steps: int
    load: float
    is_emulated: bool

    @property
    def degrees(self) -> list[int]:
        """Degrees of requests."""
        return [1 << k for k in range(self.num_ranks.bit_length())]


SETTINGS = {
    "real compute": Setting(2, (128, 256, 448), 4, 0.5, is_emulated=False),
    "emulated compute": Setting(4, (64, 128, 192), 8, 0.6, is_emulated=True),
}


def server(*, rounds: int = 3, requests: int = 30, quick: bool = False) -> dict[str, Any]:
    """Compare latencies of `balanced` with least in flight, and with the simulator.

    Six minutes. A Flux serves images of three sizes, which arrive as a Poisson process. On two
    ranks it is so large that two ranks are faster than one, the more so the larger the image; the
    first lines of the output say how much. On four ranks the compute of a step is emulated: each
    rank waits for a quarter of the seconds that a step of Qwen-Image takes on H20 GPUs at this
    degree (published), and computes a tiny Flux besides, with its messages. First the server
    measures the seconds of steps. In each round both policies get the same requests at the same
    moments, one after the other. The simulator gets the moments of arrival, and what the server
    has learned by then: seconds of steps, of encoding and decoding, and of moves.
    """
    if quick:
        rounds, requests = 2, 10
    result = dict[str, Any]()
    for name, setting in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            args = _on_rank, folder, setting, rounds, requests
            result[name] = on_ranks(*args, num_ranks=setting.num_ranks)
        _judge(f"{setting.num_ranks} ranks, {name}", result[name])
    return result


def _judge(name: str, result: Mapping[str, Any]) -> None:
    """Print what was measured with the goals."""

    def spread(of: Mapping[str, float]) -> str:
        return f"{of['median']:.3f} ({of['least']:.3f} to {of['most']:.3f})"

    for side, step_s in result["step_s"].items():
        gains = ", ".join(f"{step_s[1] / step_s[d]:.2f}x on {d}" for d in step_s if d > 1)
        say(f"{name}, {side} pixels: a step takes {step_s[1] * 1e3:.0f} ms on 1 rank; {gains}")
    shared = result["shared"]
    is_met = shared["median"] >= LEAST_SHARED
    say(f"{name}, share of requests on several ranks: {spread(shared)}", is_met)
    for policy, by_figure in result["measured_by_simulated"].items():
        for figure, over in by_figure.items():
            is_met = over["median"] <= MOST_OVER_SIMULATED[figure] if policy == "balanced" else None
            say(f"{name}, {policy}, {figure}: {spread(over)} of the simulator's", is_met)
    for figure, gain in result["gain"].items():
        is_met = gain["median"] >= LEAST_GAIN
        say(f"{name}, {figure}: least in flight takes {spread(gain)} of balanced", is_met)


MOST_RECOVERY_S = 15.0
STAGES = {  # what the server prints at the end of each; None: the old processes are gone
    "notice": r"failed \(exitcode: -9\)",
    "end the other ranks": None,
    "import and meet": r"a rank ended: restart",
    "load": r"loaded tiny in",
    "make the engine": r"tiny at http",
}


def recovery(*, num_kills: int = 6, quick: bool = False) -> dict[str, Any]:
    """Kill ranks of a server under load, and time until it serves again.

    Three minutes. `bascule serve --model tiny --ranks 4` gets eight requests of 60 steps before
    each kill. Every other kill strikes rank 0, which has the door. A kill is over when `/health`
    answers with 200; the next one comes when all requests have ended.
    """
    kills, ids = list[dict[str, float]](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--ranks", "4", "--spool", folder, "--max-restarts", "99"]
        with serving_command(options) as (process, url, lines):
            for turn in range(2 if quick else num_kills):
                for seed in range(8):
                    settings = {"size": "64x64", "steps": 60, "seed": seed, "prompt": "a boat"}
                    ids.append(post(f"{url}/v1/requests", settings)["data"][0]["id"])
                time.sleep(1.0)
                rank = turn % 2 * (1 + turn % 3)
                kills.append({"rank": rank, **_killed(process, rank, url, lines)})
                until(lambda: all(_state(url, name) in ("done", "failed") for name in ids))
            states = [_state(url, name) for name in ids]
    seconds = [kill["seconds"] for kill in kills]
    for stage in STAGES:
        say(f"{stage}: {np.median([kill[stage] for kill in kills]):.1f} s")
    text = f"{np.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"
    say(f"serving again after a kill on 4 ranks: {text}", max(seconds) <= MOST_RECOVERY_S)
    say(f"of {len(ids)} requests are done: {states.count('done')}")
    return {"kills": kills, "states": states}


NUM_ADAPTERS = 20
CHECKPOINTS = 500, 1000, 2000  # ended requests
MOST_GROWTH = 1.03  # of the resident memory, from the first checkpoint to the last


def memory(*, group: int = 5, quick: bool = False) -> dict[str, Any]:
    """Serve 2,000 tiny requests with 20 LoRA adapters in turn, and watch a rank's memory.

    A few minutes. `bascule serve --model tiny --ranks 1` loads all adapters from `--lora-folder`.
    Four clients send `group` images a call, each client with the next adapter; the images of a call
    may share a batch. At every fourth call a client removes its adapter and loads it again.
    """
    checkpoints, resources = (40, 80, 160) if quick else CHECKPOINTS, list[dict[str, float]]()
    names = [f"style{number}" for number in range(NUM_ADAPTERS)]
    with tempfile.TemporaryDirectory() as folder:
        (loras := Path(folder, "loras")).mkdir()
        for seed, name in enumerate(names):
            _save_lora(loras, name, seed)
        options = ["--ranks", "1", "--spool", str(Path(folder, "spool"))]
        with serving_command([*options, "--lora-folder", str(loras)]) as (process, url, _):
            for name in names:
                post(f"{url}/v1/loras", {"name": name})

            def use(client: int, turn: int) -> None:
                name = names[(4 * turn + client) % NUM_ADAPTERS]
                if turn % 4 == client:
                    with urlopen(Call(f"{url}/v1/loras/{name}", method="DELETE")):
                        pass
                    post(f"{url}/v1/loras", {"name": name})
                body = {"prompt": "a boat", "size": "32x32", "steps": 1, "n": group, "seed": turn}
                post(f"{url}/v1/images/generations", body | {"lora": [{"name": name}]})

            turn = 0
            with ThreadPoolExecutor(4) as clients:
                for checkpoint in checkpoints:
                    while turn * 4 * group < checkpoint:
                        list(clients.map(use, range(4), [turn] * 4))
                        turn += 1
                    resources.append({"requests": turn * 4 * group, **_used(_pids(process.pid)[0])})
                    text = "{requests} requests: {MiB:.1f} MiB, {threads} threads, {files} files"
                    say(text.format_map(resources[-1]))
    first, last = resources[0], resources[-1]
    growth = last["MiB"] / first["MiB"]
    say(f"resident memory: {growth:.3f} of the first", growth <= MOST_GROWTH)
    for name in "threads", "files":
        say(f"{name}: {last[name] - first[name]:+d}", last[name] <= first[name])
    return {"resources": resources}


def _save_lora(folder: Path, name: str, seed: int) -> None:
    """Save a LoRA of peft for the tiny Flux, with random weights."""
    from peft import LoraConfig, get_peft_model_state_dict

    pipeline = load_pipeline(TINY, torch.float32, torch.device("cpu"))
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    pipeline.transformer.add_adapter(config)
    layers = get_peft_model_state_dict(pipeline.transformer)
    file = f"{name}.safetensors"
    pipeline.save_lora_weights(folder, transformer_lora_layers=layers, weight_name=file)


def _used(pid: int) -> dict[str, Any]:
    """Return what a process holds: memory, threads and open files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    of = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"MiB": int(of["VmRSS"][0]) / 1024, "threads": int(of["Threads"][0]), "files": files}


@contextmanager
def serving_command(
    options: Sequence[str],
) -> Iterator[tuple["subprocess.Popen[str]", str, list[tuple[float, str]]]]:
    """Run `bascule serve` of the tiny model; yield its process, URL, and lines with their times."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "bascule", "serve", "--model", TINY, "--port", port, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, url = list[tuple[float, str]](), f"http://127.0.0.1:{port}"
    threading.Thread(target=_note, args=(process, lines), daemon=True).start()
    try:
        until(lambda: answers(url))
        yield process, url, lines
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()


def post(url: str, settings: Mapping[str, Any]) -> Any:
    call = Call(url, json.dumps(settings).encode(), {"Content-Type": "application/json"})
    with urlopen(call, timeout=300) as answer:
        return json.load(answer)


def _note(process: "subprocess.Popen[str]", lines: list[tuple[float, str]]) -> None:
    """Note when a server printed each line."""
    for line in process.stdout or ():
        lines.append((time.monotonic(), line))


def _killed(
    process: "subprocess.Popen[str]", rank: int, url: str, lines: list[tuple[float, str]]
) -> dict[str, float]:
    """Kill a rank; return the seconds of each stage until the server answers again, and of all."""
    pids, first, at = _pids(process.pid), len(lines), time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()))
    ended = time.monotonic()
    until(lambda: answers(url))
    seconds, before = {"seconds": time.monotonic() - at}, at
    for stage, pattern in STAGES.items():
        found = [t for t, line in lines[first:] if pattern is not None and re.search(pattern, line)]
        now = found[0] if found else ended
        seconds[stage], before = now - before, now
    return seconds


def _pids(launcher: int) -> dict[int, int]:
    """Return the processes of a launcher's ranks, by rank."""
    pids = dict[int, int]()
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        pids |= {int(name[5:]): int(pid) for name in variables if name.startswith(b"RANK=")}
    return pids


def until(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError("the server did not do it in time")
        time.sleep(0.01)


def answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:  # also a refusal
        return False


def _state(url: str, request_id: str) -> str:
    with urlopen(f"{url}/v1/requests/{request_id}") as answer:
        return json.load(answer)["state"]


# --- the pipelines --------------------------------------------------------------------------------


def _pipeline(setting: Setting) -> Any:
    pipeline = load_pipeline(TINY, torch.float32, torch.device("cpu"))
    config = dict(pipeline.transformer.config)
    if setting.is_emulated:
        config |= {"num_layers": 1, "num_single_layers": 1}
    else:
        config |= {"num_layers": 4, "num_single_layers": 4, "num_attention_heads": 8}
        config |= {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
    torch.manual_seed(0)
    pipeline.transformer = type(pipeline.transformer).from_config(config).eval()
    if setting.is_emulated:
        blocks = pipeline.transformer.transformer_blocks
        for block in blocks:
            block.forward = _waiting(block.forward, len(blocks))
    encode = pipeline.encode_prompt
    short = {"max_sequence_length": _TEXT_TOKENS}
    pipeline.encode_prompt = lambda *args, **kwargs: encode(*args, **kwargs | short)
    return pipeline


def _waiting(forward: Callable[..., Any], num_blocks: int) -> Callable[..., Any]:
    """Let a block wait for its share of the seconds of a step, by its rows of image and text."""

    def wait(hidden_states: Any, encoder_hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        degree = round(_TEXT_TOKENS / encoder_hidden_states.shape[1])
        tokens = hidden_states.shape[1] * degree
        time.sleep(qwen_h20(64 * tokens)[degree] / EMULATED_SPEED / num_blocks)
        return forward(hidden_states, encoder_hidden_states, *args, **kwargs)

    return wait


# --- on each rank ---------------------------------------------------------------------------------


class _Switched:
    """A policy that another one replaces when no request is left."""

    def __init__(self) -> None:
        self.policy: Policy = Balanced()

    def decide(self, state: State, act: Starts) -> None:
        """Decide as the present policy."""
        self.policy.decide(state, act)


def _on_rank(folder: str, setting: Setting, rounds: int, num: int) -> dict[str, Any] | None:
    """Run a server; on the first rank, a thread uses it."""
    pipeline, result = _pipeline(setting), dict[str, Any]()
    engine = Engine(pipeline)
    if engine.orders is None:
        engine.run()
        return None
    times, policy = Times(pipeline, engine.degrees), _Switched()
    spool = Spool(Path(folder), TINY)
    options = ServeOptions(batch=1)
    service = Service(pipeline, engine.orders, spool, options, policy=policy, times=times)

    def use() -> None:
        try:
            result.update(_measured(service, policy, times, setting, rounds, num))
        finally:
            service.stop()

    service.start()
    thread = threading.Thread(target=use)
    thread.start()
    engine.run()
    thread.join()
    service.close()
    return result


def _measured(
    service: Service, policy: _Switched, times: Times, setting: Setting, rounds: int, num: int
) -> dict[str, Any]:
    """Measure the seconds of steps; then serve the load of each round by both policies."""
    runs = list[dict[str, Any]]()
    for degree in setting.degrees:
        policy.policy = Queue("fifo", degree)
        prompts = [_prompt(side, 4) for side in setting.sides for _ in range(setting.num_ranks)]
        _serve(service, [(0.0, prompt) for prompt in prompts])
    for turn in range(rounds):
        due = _load(setting, times, np.random.default_rng(100 + turn), num)
        for name in list(POLICIES)[:: 1 if turn % 2 else -1]:
            policy.policy = POLICIES[name]()
            run = _serve(service, due)
            requests = [
                _request(times, _prompt(side, setting.steps), arrival_s)
                for side, arrival_s in zip(run["side"], run["arrival_s"], strict=True)
            ]
            move_s = service._scheduler.state.move_s
            simulated = serve(requests, POLICIES[name](), setting.num_ranks, move_s=move_s)
            run |= {"simulated_s": simulated.latency_s.tolist(), "move_s": move_s}
            runs.append({"round": turn, "policy": name, **run})
    return _compared(runs, setting, times)


def _prompt(side: int, steps: int) -> Prompt:
    return Prompt(prompt="a boat", width=side, height=side, steps=steps)


def _load(
    setting: Setting, times: Times, random: np.random.Generator, num: int
) -> list[tuple[float, Prompt]]:
    """Draw the times of arrival and the prompts."""
    prompts = [_prompt(side, setting.steps) for side in setting.sides]
    works = [_request(times, prompt, 0.0).work_s for prompt in prompts]
    usual_s = float(np.dot(works, SHARES)) / setting.num_ranks / setting.load
    due_s = np.cumsum(random.exponential(usual_s, size=num))
    kinds = random.choice(len(prompts), size=num, p=SHARES)
    return [(float(due), prompts[kind]) for due, kind in zip(due_s, kinds, strict=True)]


def _request(times: Times, prompt: Prompt, arrival_s: float) -> Request:
    size = times.request_size(prompt, {})
    step_s, once_s = times.step_s(size), times.once_s(size)
    return Request(step_s=dict(step_s), steps=prompt.steps or 1, arrival_s=arrival_s, once_s=once_s)


def _serve(service: Service, due: Sequence[tuple[float, Prompt]]) -> dict[str, Any]:
    """Submit prompts at their times; return what was measured when all have ended."""
    ended, statuses, ranks = threading.Event(), dict[str, Status](), dict[str, int]()

    def note(status: Status) -> None:
        ranks[status.id] = max(len(status.ranks), ranks.get(status.id, 0))
        if status.has_ended:
            statuses[status.id] = status
            if len(statuses) == len(due):
                ended.set()

    service.on_change = note
    begin = time.monotonic()
    for due_s, prompt in due:
        time.sleep(max(0.0, begin + due_s - time.monotonic()))
        service.submit([prompt])
    while not ended.wait(1.0):
        if reason := service.health():
            raise RuntimeError(reason)
    if failed := {status.reason for status in statuses.values() if status.state != "done"}:
        raise RuntimeError(f"requests failed: {failed}")
    served = sorted(statuses.values(), key=lambda status: status.created_at)
    created = [status.created_at for status in served]
    return {
        "id": [status.id for status in served],
        "side": [status.prompt.width for status in served],
        "most_ranks": [ranks[status.id] for status in served],
        "arrival_s": [at - created[0] for at in created],
        "measured_s": [(s.ended_at or 0.0) - at for s, at in zip(served, created, strict=True)],
    }


# --- figures --------------------------------------------------------------------------------------


def _compared(runs: Sequence[dict[str, Any]], setting: Setting, times: Times) -> dict[str, Any]:
    def seconds(policy: str, what: str, of: str) -> list[float]:
        return [FIGURES[what](run[of]) for run in runs if run["policy"] == policy]

    def with_range(numbers: Sequence[float]) -> dict[str, float]:
        return {"median": float(np.median(numbers)), "least": min(numbers), "most": max(numbers)}

    def over(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
        return with_range([x / y for x, y in zip(a, b, strict=True)])

    counted, ours = POLICIES
    shared = [np.mean(np.array(r["most_ranks"]) > 1) for r in runs if r["policy"] == ours]
    prompts = {side: _prompt(side, setting.steps) for side in setting.sides}
    return {
        "num_ranks": setting.num_ranks,
        "step_s": {
            side: dict(times.step_s(times.request_size(prompt, {})))
            for side, prompt in prompts.items()
        },
        "once_s": {
            side: times.once_s(times.request_size(prompt, {})) for side, prompt in prompts.items()
        },
        "shared": with_range([float(share) for share in shared]),
        "measured_by_simulated": {
            name: {
                what: over(seconds(name, what, "measured_s"), seconds(name, what, "simulated_s"))
                for what in FIGURES
            }
            for name in POLICIES
        },
        "gain": {
            what: over(seconds(counted, what, "measured_s"), seconds(ours, what, "measured_s"))
            for what in FIGURES
        },
        "runs": list(runs),
    }
