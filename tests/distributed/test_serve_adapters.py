"""LoRA adapters by request: pixels of one process with `set_adapters`, wherever steps are computed.

Adapters come and go while requests run, restart and change ranks.
"""

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from bascule.diffusers.degrees import Shape
from bascule.errors import ConfigError
from bascule.generate.options import GenerateOptions, Lora, Prompt, names_of, read_prompts
from bascule.generate.tiny import TINY
from bascule.plan.requests import Block
from bascule.serve import adapters
from bascule.serve.service import Service
from bascule.serve.spool import Entry, Spool
from bascule.serve.status import Refusal, Status
from tests.helpers.loras import choose, reference, save_lora
from tests.helpers.ranks import run_ranks
from tests.helpers.serving import (
    Even,
    Restless,
    Ride,
    Served,
    apart,
    pipeline_of,
    serve,
    with_service,
)

for _needed in ("diffusers", "transformers", "peft"):
    pytest.importorskip(_needed)
pytestmark = pytest.mark.slow

PIXEL = 1.001 / 255
NAME = "pytorch_lora_weights.safetensors"
TARGETS = "to_k", "proj_out", "ff.net.2"
SIZES: dict[str, Any] = {"width": 64, "height": 48, "steps": 4}
CHOICES: list[Sequence[Lora]] = [
    (),
    (Lora("a"),),
    (Lora("b", 0.5),),
    (Lora("a", -0.7), Lora("b", 0.8)),
    (Lora("a", 0.7),),
]


def ended(service: Service, ids: Sequence[str]) -> list[Status]:
    """The statuses of requests, once all have ended."""
    until = time.monotonic() + 90
    while not all(status.has_ended for status in map(service.status, ids)):
        assert time.monotonic() < until, service.statuses()
        time.sleep(0.01)
    return list(map(service.status, ids))


def asked(choices: Sequence[Sequence[Lora]], first: int = 0) -> list[Prompt]:
    return [
        Prompt(prompt=f"boat {seed}", seed=seed, lora=tuple(choice), **SIZES)
        for seed, choice in enumerate(choices, first)
    ]


def refused(call: Any, *args: Any) -> str:
    with pytest.raises((Refusal, ConfigError)) as met:
        call(*args)
    return str(met.value)


def client(service: Service, folder: Path) -> list[float]:
    """Load and remove adapters between requests; return how far their pixels are from wanted."""
    assert service.loras() == ["a", "c"]  # an earlier request needs c
    (lost,) = ended(service, ["lost"])
    assert lost.state == "failed"
    assert lost.reason == "LoRA 'gone' is gone: there is no LoRA 'gone' in this server's folder"
    assert "lora: 'b' is not loaded; loaded: 'a', 'c'" in refused(service.submit, asked(CHOICES))
    before = service.submit(asked([CHOICES[1], ()] * 2))
    service.load_lora("b").result(60)  # while they run
    assert "'b' is loaded already" in refused(service.load_lora, "b")
    made = [*before, *service.submit(asked(CHOICES * 2, len(before)))]
    for name, said in (
        ("wide", "LoRA 'wide': wide.safetensors: transformer."),
        ("other", "LoRA 'other': other.safetensors: its unet."),
        *[("odd", "rank 1: LoRA 'odd': this rank's file is not rank 0's: give all ranks")] * 2,
    ):
        reason = refused(service.load_lora(name).result, 60)
        assert reason.startswith(said), reason
    for name, said in (
        ("none", "there is no LoRA 'none' in this server's folder"),
        ("../outside0", "'../outside0' is outside of the folder: copy it there"),
        ("link", "'link' is outside of the folder"),
        ("deep", "'deep' is outside of the folder"),
    ):
        assert said in refused(service.load_lora, name), name
    (one,) = service.submit(asked([CHOICES[1]], 90))
    assert "needs LoRA 'a': try again when it has ended" in refused(service.remove_lora, "a")
    statuses = ended(service, [*(status.id for status in [*made, one]), "kept"])
    service.remove_lora("a").result(60)
    assert service.loras() == ["b", "c"]
    assert "there is no LoRA 'a'; loaded: c, b" in refused(service.remove_lora, "a")
    assert "'a' is not loaded" in refused(service.submit, asked([CHOICES[1]]))
    for _ in range(3):  # in turn
        service.load_lora("a").result(60)
        service.remove_lora("a").result(60)
    paths, wanted = {"a": folder / "a", "b": folder / "b", "c": folder / "b"}, list[float]()
    pipeline = reference(paths)
    for status in statuses:
        assert status.state == "done", status.reason
        choose(pipeline, status.prompt.lora)
        wanted.append(apart(status, service.result(status.id), pipeline))
    return wanted


def next_client(service: Service, folder: Path) -> list[float]:
    """What clients loaded before is there again."""
    assert service.loras() == ["a", "b", "c"]
    (status,) = ended(service, [service.submit(asked([CHOICES[3]], 91))[0].id])
    assert status.state == "done", status.reason
    pipeline = choose(reference({name: folder / name for name in "ab"}), status.prompt.lora)
    return [apart(status, service.result(status.id), pipeline)]


def in_two_lives(spool: Path, folder: Path) -> Any:
    """A service, and one that starts after its end."""
    loras: dict[str, Any] = {"loras": {"a": folder / "a"}, "lora_folder": folder}
    serve = partial(with_service, kind=Even, policy=Restless(3), **loras)
    lives = (pipeline_with_an_odd_file, client), (partial(pipeline_of, TINY), next_client)
    ends = [serve(make, spool, use, folder) for make, use in lives]
    return ends[0] and [*ends[0], *ends[1]]


def pipeline_with_an_odd_file() -> Any:
    """Rank 1 has another content of one file."""
    digest_of = adapters.digest_of

    def of_this_rank(file: Path) -> str:
        return "another" if file.stem == "odd" and dist.get_rank() else digest_of(file)

    adapters.digest_of = of_this_rank  # of this process, which ends with the test
    return pipeline_of(TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loras")
    save_lora(path / "a", 1, text=True)
    save_lora(path / "b", 2, TARGETS)
    (outside := tmp_path_factory.mktemp("outside")).joinpath("x.safetensors").touch()
    (path / "link").symlink_to(outside)
    (path / "deep").mkdir()
    (path / "deep" / "x.safetensors").symlink_to(outside / "x.safetensors")
    tensors = safetensors.torch.load_file(path / "a" / "pytorch_lora_weights.safetensors")
    wide = {key: torch.cat([x, x], 1) if "lora_A" in key else x for key, x in tensors.items()}
    safetensors.torch.save_file(wide, path / "wide.safetensors")
    for name in ("c", "odd"):
        shutil.copy(path / "b" / "pytorch_lora_weights.safetensors", path / f"{name}.safetensors")
    others = {f"unet.{key}": x for key, x in tensors.items()}
    safetensors.torch.save_file(others, path / "other.safetensors")
    return path


def test_requests_choose_adapters_while_they_come_and_go(folder: Path, tmp_path: Path) -> None:
    with closing(Spool(tmp_path / "spool", "tiny")) as spool:  # of an earlier server
        for name, lora in (("kept", "c"), ("lost", "gone")):
            (prompt,) = asked([[Lora(lora, 0.6)]])
            facts: dict[str, Any] = {"kind": "image", "state": "waiting", "prompt": prompt}
            spool.add([Entry(Status(id=name, **facts, created_at=time.time()))])
    found = run_ranks(in_two_lives, 2, tmp_path / "spool", folder)[0]
    assert len(found) == 17 and max(found) <= PIXEL


LATENT: dict[str, Any] = {"prompt": "a boat", "height": 64, "width": 48, "output_type": "latent"}
LATENT["num_inference_steps"] = 6


def with_all(folder: Path, pipeline: Any, choice: Sequence[Lora]) -> Any:
    """The pipeline of one process with a choice of adapters."""
    del pipeline
    return choose(reference({name: folder / name for name in "ab"}), choice)


def in_batches(scenes: list[Ride], folder: Path, **ways: Any) -> dict[str, Served]:
    make, paths = partial(pipeline_of, TINY), {"a": folder / "a"}
    return serve(make, scenes, paths, partial(with_all, folder), save_every=2, **ways)


@pytest.mark.some(1)
@pytest.mark.parametrize("shape", [None, Shape(1, 1, 1, 2)], ids=["blocks", "replica"])
def test_members_of_a_batch_choose_adapters(shape: Shape | None, folder: Path) -> None:
    """Adapters come and go in between; a member goes on from its saved state, with others."""
    block, path = Block(0, 2 if shape is None else 1), folder / "b" / NAME
    choices = {"again": CHOICES[3], "x": CHOICES[1], "y": (), "late": CHOICES[4]}
    choices |= {"wrong": CHOICES[2], "new": CHOICES[3]}
    script = [["x", "y"], ("go on",), ("board", "wrong"), ("adapt", "b", path), ("go on",)]
    script += [("board", "late"), ("board", "again"), *[("go on",)] * 3, ("cancel", "again")]
    names = [name for name in choices if name != "new"]
    first = Ride({name: LATENT for name in names}, block, script, choices)
    two = {"again": LATENT, "new": LATENT}
    then = Ride(two, block, [["new", "again"], ("adapt", "a2", folder / "a" / NAME)], choices)
    last = Ride({"y3": LATENT}, block, [["y3"], ("adapt", "a2", None)])
    served = run_ranks(partial(in_batches, shape=shape), 2, [first, then, last], folder)[0]
    assert served["wrong"].end.kind == "failed"
    assert "lora: 'b' is not loaded; loaded: 'a'" in served["wrong"].end.reason
    assert next(event.step for event in served["again"].events if event.kind == "step") == 3
    for name in ("x", "y", "late", "again", "new", "y3"):
        assert served[name].end.kind == "done", served[name].end
        assert served[name].apart <= 1e-5, name


def made(prompts: Path, out: Path, jobs: list[dict[str, Any]]) -> None:
    """What `bascule generate` makes with each of the settings, in a folder of its own."""
    from bascule.generate.generation import Generation

    torch.set_num_threads(1)
    for place, job in enumerate(jobs):
        options = GenerateOptions(prompts=prompts, out=out / str(place), width=64, height=48, **job)
        Generation(options, torch.device("cpu")).run(lambda *_: None)


@pytest.mark.parametrize(
    "jobs",
    [[{"ring": 2}], pytest.param([{"ulysses": 2, "compile": True}], marks=pytest.mark.nightly)],
)
def test_adapters_of_lines(jobs: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    choices = [
        *CHOICES,
        *([Lora("b", 0.1 * k), Lora("a", 0.1)] for k in range(5 * len(jobs[0]) - 5)),
    ]
    rows = [{**asdict(prompt), "prompt": f"boat {k}"} for k, prompt in enumerate(asked(choices))]
    (path := folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_ranks(made, 2, path, tmp_path, jobs)
    pipeline = reference({name: folder / name for name in "ab"})
    for place, job in enumerate(jobs):
        options = GenerateOptions(prompts=path, width=64, height=48, **job)
        names = names_of(read_prompts(options), options)
        for name, prompt in zip(names, asked(choices), strict=True):
            choose(pipeline, prompt.lora)
            facts: dict[str, Any] = {
                "id": name,
                "kind": "image",
                "state": "done",
                "created_at": 0.0,
            }
            image = tmp_path / str(place) / f"{name}.png"
            far = apart(Status(**facts, prompt=prompt), image, pipeline)
            assert far <= PIXEL, (job, prompt)
