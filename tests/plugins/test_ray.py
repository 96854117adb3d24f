"""Ray on a local cluster of two nodes: runs and servers that lose a process, and change in size."""

# pyright: reportMissingImports=false

import base64
import io
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.plugins.hosts import ROOT

ray: Any = pytest.importorskip("ray", reason="Ray is not installed; see `make ray`")
httpx2: Any = pytest.importorskip("httpx2")

NUM, STEP_SAMPLES, LAST = 48, 8, 12  # of an epoch, of a step on all workers; steps of two epochs
PIXEL = 1.001 / 255


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    paths = ROOT / "src", ROOT, Path(__file__).parent, os.environ.get("PYTHONPATH", "")
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    own |= {"GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0"}
    own |= {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5"}
    own |= {"RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0"}  # calls come to both replicas
    small: Any = {"num_cpus": 2, "object_store_memory": 200 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        nodes = Cluster(True, head_node_args=small | {"include_dashboard": False})
        try:
            nodes.add_node(**small)
            ray.init(address=nodes.address)
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 1)).double()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.net(ids).squeeze(-1) * mask
        return (scores.sum(1) / mask.sum(1) - 1).square().mean()


def samples() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    lengths = [90 + 7 * n if n % 8 < 3 else 4 + n % 5 for n in range(NUM)]
    return [
        {"input_ids": torch.randint(0, 32, (length,), generator=draw), "number": torch.tensor(n)}
        for n, length in enumerate(lengths)
    ]


def optimizer_of(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def gradient_of(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist()


def loop(config: dict[str, Any]) -> None:
    """A worker of the trainer: writes down each step, and ends after the step `last`."""
    from ray.train import CheckpointConsistencyMode
    from ray.train.torch import prepare_model

    from bascule import BalancedLoader, TransformerCost
    from bascule.data import ResumableSampler, collate_padded
    from bascule.plugins.ray_train import Resumable

    rank, num_ranks, folder = dist.get_rank(), dist.get_world_size(), Path(config["folder"])
    model = prepare_model(Net())
    optimizer, schedule = optimizer_of(model)
    sampler = ResumableSampler(NUM, rank=rank, num_ranks=num_ranks, seed=3)
    size = STEP_SAMPLES // num_ranks
    texts: Any = samples()
    local = DataLoader(texts, size, sampler=sampler, collate_fn=collate_padded)
    with BalancedLoader(local, cost=TransformerCost(16)) as loader:
        run = Resumable(loader, model, optimizer, schedule=schedule)
        step = first = schedule.last_epoch
        while True:
            for batch in loader:
                ids, mask = batch.data["input_ids"], batch.data["attention_mask"]
                loss = model(ids, mask) * batch.loss_scale
                optimizer.zero_grad()
                loss.backward()
                dist.all_reduce(total := loss.detach() / num_ranks)
                optimizer.step()
                schedule.step()
                step += 1
                if step == config["killed"] and first < step - 1 and rank == 1:  # once
                    ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
                    os.kill(os.getpid(), signal.SIGKILL)
                row = {"loss": total.item(), "gradient": gradient_of(model)}
                row |= {"first": first, "numbers": batch.data["number"].tolist()}
                path = folder / f"{step} {rank} of {num_ranks}"
                path.write_text(json.dumps(row))
                run.report({"loss": total.item()}, saves=step % 2 == 0)
                if step == config["last"]:
                    return


def expected_steps() -> list[dict[str, Any]]:
    """The same steps by one process without a loader."""
    from bascule.plan.epoch import epoch_order

    model, steps, texts = Net(), list[dict[str, Any]](), samples()
    optimizer, schedule = optimizer_of(model)
    for step in range(LAST):
        epoch, first = divmod(step * STEP_SAMPLES, NUM)
        order = epoch_order(NUM, shuffle=True, seed=3, epoch=epoch)
        numbers = order[first : first + STEP_SAMPLES].tolist()
        texts_of_step = [texts[number]["input_ids"][None] for number in numbers]
        losses = [model(ids, torch.ones_like(ids)) for ids in texts_of_step]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        row = {"loss": loss.item(), "gradient": gradient_of(model), "numbers": sorted(numbers)}
        steps.append(row)
    return steps


def test_training_goes_on_with_other_workers(cluster: None, tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    how: Any = {"use_gpu": False, "placement_strategy": "STRICT_SPREAD"}
    for num_workers, last, killed in ((2, 4, 0), (1, 8, 0), (2, LAST, 11)):
        TorchTrainer(
            loop,
            train_loop_config={"folder": str(tmp_path), "last": last, "killed": killed},
            torch_config=TorchConfig(backend="gloo", timeout_s=120),
            scaling_config=ScalingConfig(num_workers=num_workers, **how),
            run_config=RunConfig(
                name="run",
                storage_path=str(tmp_path / "storage"),
                failure_config=FailureConfig(max_failures=1),
            ),
        ).fit()
    sizes, firsts = [2] * 4 + [1] * 4 + [2] * 4, [0] * 4 + [4] * 4 + [8] * 2 + [10] * 2
    for step, expected in enumerate(expected_steps(), 1):
        names = [f"{step} {rank} of {sizes[step - 1]}" for rank in range(sizes[step - 1])]
        rows = [json.loads((tmp_path / name).read_text()) for name in names]
        assert [row["first"] for row in rows] == [firsts[step - 1]] * len(rows)
        assert sorted(n for row in rows for n in row["numbers"]) == expected["numbers"]
        for row in rows:
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-10)
            assert row["gradient"] == pytest.approx(expected["gradient"], rel=1e-9, abs=1e-12)
    assert len(list(tmp_path.glob("* of *"))) == sum(sizes)


@contextmanager
def served(folder: Path, num_ranks: int, **settings: Any) -> Iterator[str]:
    """An application of Ray Serve; the URL of its proxy."""
    from ray import serve

    from bascule.plugins.ray_serve import Settings, app

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = f"--model tiny --ranks {num_ranks} --spool {folder / 'spool'}"
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(app(Settings(command=command, gpus=0, **settings)), name="images")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def until(condition: Callable[[], Any], timeout_s: float = 300.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


def accepted(url: str, seed: int, steps: int, side: int = 64) -> str:
    asked = {"prompt": "boat", "size": f"{side}x{side}", "steps": steps, "seed": seed}
    answer = httpx2.post(f"{url}/v1/requests", json=asked, timeout=100)
    assert answer.status_code == 202, answer.text
    return answer.json()["data"][0]["id"]


def row(url: str, request_id: str) -> dict[str, Any]:
    """A request; nothing while no replica answers."""
    with suppress(httpx2.TransportError):
        answer = httpx2.get(f"{url}/v1/requests/{request_id}", timeout=100)
        return answer.json() if answer.is_success else {}
    return {}


def is_as_by_one_process(png: bytes, seed: int, steps: int, side: int = 64) -> bool:
    from bascule.generate.generating import arguments_of
    from bascule.generate.options import Prompt
    from bascule.generate.tiny import TINY
    from tests.helpers.serving import pipeline_of, values_of

    pipeline, draw = pipeline_of(TINY), torch.Generator().manual_seed(seed)
    prompt = Prompt(prompt="boat", width=side, height=side, steps=steps, seed=seed)
    arguments = arguments_of(prompt, signature(pipeline.__call__).parameters)
    wanted = values_of(pipeline(**arguments, generator=draw, return_dict=False)[0][0])
    return float((values_of(Image.open(io.BytesIO(png))) - wanted).abs().max()) <= PIXEL


def content(url: str, request_id: str) -> Any:
    return httpx2.get(f"{url}/v1/requests/{request_id}/content", timeout=100)


def num_replicas() -> int:
    from ray import serve

    states = serve.status().applications["images"].deployments["bascule"].replica_states
    return states.get("RUNNING", 0)


def test_a_server_outlives_a_rank(cluster: None, tmp_path: Path) -> None:
    openai: Any = pytest.importorskip("openai")
    with served(tmp_path, 2) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=100, max_retries=0)
        asked = {"prompt": "boat", "size": "64x64", "extra_body": {"steps": 4, "seed": 7}}
        image = client.images.generate(**asked).data[0]
        png = base64.b64decode(image.b64_json)
        assert is_as_by_one_process(png, seed=7, steps=4)
        again = content(url, image.id)
        assert (again.content, again.headers["content-type"]) == (png, "image/png")
        assert again.headers["x-content-type-options"] == "nosniff"
        (event,) = client.images.generate(**asked, stream=True)
        assert event.type == "image_generation.completed"
        assert is_as_by_one_process(base64.b64decode(event.b64_json), seed=7, steps=4)
        with pytest.raises(openai.BadRequestError, match="size"):
            client.images.generate(prompt="boat", size="64")

        running = accepted(url, 8, steps=200, side=128)
        early = content(url, running)
        assert (early.status_code, early.headers["x-should-retry"]) == (409, "false")
        with httpx2.stream("GET", f"{url}/v1/requests/{running}/events", timeout=100) as events:
            assert events.headers["cache-control"] == "no-store"
            lines = (json.loads(line[6:]) for line in events.iter_lines() if line)
            assert next(event for event in lines if event["step"] >= 20)["state"] == "running"
        actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        (name,) = [name for name in actors if name.endswith("rank 1")]
        ray.kill(ray.get_actor(name, namespace="bascule"))
        until(lambda: row(url, running).get("state") == "done")
        assert is_as_by_one_process(content(url, running).content, 8, steps=200, side=128)
        png = base64.b64decode(client.images.generate(**asked).data[0].b64_json)
        assert is_as_by_one_process(png, seed=7, steps=4)


def test_replicas_follow_the_predicted_backlog(cluster: None, tmp_path: Path) -> None:
    scaling = {"max_replicas": 2, "upscale_delay_s": 0.0, "downscale_delay_s": 15.0}
    scaling |= {"metrics_interval_s": 0.5, "look_back_period_s": 1.0}
    with served(tmp_path, 1, backlog_s=0.5, scaling=scaling) as url:
        steps = {accepted(url, seed, steps=200, side=128): 200 for seed in range(4)}
        until(lambda: num_replicas() == 2)
        late = {accepted(url, seed, steps=4): 4 for seed in range(4, 12)}
        seeds = {request_id: seed for seed, request_id in enumerate([*steps, *late])}
        for _ in range(4):  # whichever replica the proxy asks
            assert all(row(url, request_id)["id"] == request_id for request_id in seeds)
        for request_id in seeds:
            until(lambda name=request_id: row(url, name).get("state") == "done")
        images = {request_id: content(url, request_id).content for request_id in seeds}
        for request_id, num_steps in (steps | late).items():
            side = 128 if num_steps == 200 else 64
            assert is_as_by_one_process(images[request_id], seeds[request_id], num_steps, side)
        until(lambda: num_replicas() == 1)
