"""Packs of a vision-language model in training: loader, packs and encoder in balance together."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import bascule
from bascule.data import BalancedLoader, LoaderOptions
from bascule.data.packs import VISUAL_FIELDS, Pack
from bascule.encoders import BalancedEncoder
from bascule.transformers import inputs_of_pack
from tests.helpers.encoder_cases import gradients_of, tower_of
from tests.helpers.ranks import run_ranks
from tests.helpers.trainer_runs import num_asked
from tests.helpers.vlm_models import MODELS, make_model, make_videos

COST, PACK = bascule.TransformerCost(16), Pack(192)


def loss_of(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Summed; in float64, which that of transformers is not."""
    return cross_entropy(logits[0], shift_labels, ignore_index=-100, reduction="sum")


def train(name: str, min_gain: float) -> tuple[float, list[str]]:
    """A step on packs; what the encoder moved. Gradients are those of the samples one by one."""
    rank, samples = torch.distributed.get_rank(), make_videos(name)
    plain, model = make_model(name), make_model(name)
    expected = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        fields = {k: v if k in VISUAL_FIELDS else v[None] for k, v in sample.items()}
        expected = expected + loss_of(
            plain(**fields, use_cache=False).logits[:, :-1], sample["labels"][1:]
        )
    expected = expected / sum(map(num_asked, samples))
    expected.backward()
    installed = BalancedEncoder(tower_of(model), cost=COST).install(model)
    own: Any = samples[:4] if rank == 0 else samples[4:]
    loader = BalancedLoader(
        DataLoader(own, batch_size=4, collate_fn=list),
        cost=COST,
        pack=PACK,
        options=LoaderOptions(weight_fn=num_asked, ends="pad_empty", min_gain=min_gain),
    )
    total, said = 0.0, list[str]()
    for batch in loader:
        inputs = inputs_of_pack(batch.data, PACK, model)
        labels = inputs.pop("labels")
        shift = batch.data["shift_labels"]
        assert labels.shape == (1, len(shift))
        mean = loss_of(model(**inputs).logits, shift) / max(1, int((shift != -100).sum()))
        loss = mean * batch.loss_scale
        loss.backward()
        share = loss.detach() / 2
        torch.distributed.all_reduce(share)
        total += float(share)
        said += [batch.verdict.reason, *map(str, installed.encodings)]
    assert total == pytest.approx(float(expected), rel=1e-10)
    grads, wanted = gradients_of(model), gradients_of(plain)
    everything = sum(float((grad**2).sum()) for grad in wanted.values()) ** 0.5
    for key, grad in wanted.items():
        error = float((grads[key] - grad).norm())
        assert error <= 1e-10 * float(grad.norm()) + 1e-13 * everything, (key, error)
    return total, said


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MODELS)
def test_packs_with_images_and_videos_train_as_their_samples_one_by_one(name: str) -> None:
    pytest.importorskip("transformers")
    first, second = run_ranks(train, 2, name, 0.02)
    assert first == second and first[1][0] == "balanced"
    first, second = run_ranks(train, 2, name, 0.9)  # samples stay, so images are uneven
    assert first == second and first[1][0] == "gain"
    assert any("items moved: imbalance" in one for one in first[1])
