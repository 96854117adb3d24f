"""Batches and packs through the real VLM classes of transformers, tiny and with random weights.

The loss of several samples together is the mean of their own losses, weighted by the tokens that
each is asked for. Images differ in number and size, and every parameter is random.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from bascule.data.packs import VISUAL_FIELDS, Pack, collate_padded, make_pack
from bascule.transformers import inputs_of_pack
from tests.helpers.vlm_models import MODELS, QWENS, make_model, make_samples, make_videos

pytest.importorskip("transformers")


def summed_loss(logits: Tensor, shift_labels: Tensor) -> tuple[Tensor, int]:
    """Loss in float64 (transformers rounds logits to float32), and the tokens it is made of."""
    flat = shift_labels.flatten()
    loss = cross_entropy(logits.flatten(0, 1), flat, ignore_index=-100, reduction="sum")
    return loss, int((flat != -100).sum())


def shifted(labels: Tensor) -> Tensor:
    return pad(labels[:, 1:], (0, 1), value=-100)


def alone(model: Any, samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The weighted mean loss of the samples one by one, the same by the model, and their logits."""
    losses, theirs, counts, logits = [], [], [], []
    for sample in samples:
        batch = {name: x if name in VISUAL_FIELDS else x[None] for name, x in sample.items()}
        out = model(**batch, use_cache=False)
        loss, count = summed_loss(out.logits, shifted(batch["labels"]))
        losses.append(loss)
        theirs.append(out.loss * count if count else torch.tensor(0.0))  # theirs would be nan
        counts.append(count)
        logits.append(out.logits[0])
    total = sum(counts)
    return torch.stack(losses).sum() / total, torch.stack(theirs).sum() / total, logits


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def packed_inputs(model: Any, pack: Mapping[str, Any]) -> dict[str, Any]:
    """What a Qwen-VL takes for a pack, but labels."""
    inputs = inputs_of_pack(pack, Pack(len(pack["positions"])), model)
    return {name: x for name, x in inputs.items() if name not in ("labels", "use_cache")}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "chosen",
    [[0, 1, 2, 3, 4], [1, 3], [4, 0], [3, 2], [1]],
    ids=["mixed", "text", "images", "long", "one"],
)
def test_a_padded_batch_has_the_mean_loss_of_its_samples(name: str, chosen: list[int]) -> None:
    model = make_model(name)
    samples = [make_samples(name)[i] for i in chosen]
    expected, theirs, logits = alone(model, samples)
    expected_grads = gradients(model, expected)
    batch = collate_padded(samples, pad_id=50, multiple_of=8)
    assert ("pixel_values" in batch) == any("pixel_values" in sample for sample in samples)
    out = model(**batch, use_cache=False)
    for row, own in zip(out.logits, logits, strict=True):
        torch.testing.assert_close(row[: len(own)], own, rtol=0, atol=1e-10)
    loss, count = summed_loss(out.logits, shifted(batch["labels"]))
    torch.testing.assert_close(loss / count, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.loss, theirs, rtol=1e-6, atol=0)
    grads = gradients(model, loss / count)
    assert grads.keys() == expected_grads.keys()
    for parameter, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[parameter], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4], [1, 3], [2]], ids=["mixed", "text", "one"])
@pytest.mark.parametrize("make", [make_samples, make_videos])
def test_a_pack_has_the_mean_loss_of_its_samples(
    name: str, fixed: bool, chosen: list[int], make: Callable[[str], list[dict[str, Any]]]
) -> None:
    model = make_model(name)
    samples = [make(name)[i] for i in chosen]
    expected, theirs, logits = alone(model, samples)
    pack = make_pack(samples, Pack(256, fixed=fixed, pad_id=50))
    inputs = packed_inputs(model, pack)
    out = model(**inputs, labels=pack["labels"][None], use_cache=False)
    for start, own in zip(pack["cu_seqlens"].tolist(), logits, strict=False):
        rows = out.logits[0, start : start + len(own)]
        torch.testing.assert_close(rows, own, rtol=0, atol=1e-10)
    loss, count = summed_loss(out.logits, pack["shift_labels"])
    torch.testing.assert_close(loss / count, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.loss, theirs, rtol=1e-6, atol=0)  # labels shifted by the model
    shift_labels = pack["shift_labels"][None]
    again = model(**inputs, labels=shift_labels, shift_labels=shift_labels, use_cache=False)
    torch.testing.assert_close(again.loss, theirs, rtol=1e-6, atol=0)


def test_an_internvl_pack_joins_the_tiles_as_a_batch_does() -> None:
    samples = make_samples("internvl")
    pack, batch = make_pack(samples, Pack(200)), collate_padded(samples)
    assert pack["pixel_values"].shape[1:] == (3, 8, 8)
    assert torch.equal(pack["pixel_values"], batch["pixel_values"])
    assert pack["cu_items"]["pixel_values"].diff().tolist() == [6, 0, 12, 0, 6]


@pytest.mark.parametrize("name", QWENS)
def test_the_comparison_sees_what_crosses_a_boundary(name: str) -> None:
    model = make_model(name)
    samples = make_samples(name)
    expected, theirs, _ = alone(model, samples)
    pack = make_pack(samples, Pack(96))
    inputs: dict[str, Any] = packed_inputs(model, pack) | {"use_cache": False}
    given = torch.cat([sample["labels"] for sample in samples])[None]
    assert (model(**inputs, labels=given).loss - theirs).abs() > 1e-3
    # What make_pack warns of: with a cache or a mask, transformers lets samples see each other.
    wrongs: list[dict[str, Any]] = [
        {"pixel_values": inputs["pixel_values"].roll(4, 0)},
        {"use_cache": True},
        {"attention_mask": torch.ones_like(inputs["input_ids"])},
    ]
    for wrong in wrongs:
        loss, count = summed_loss(model.train()(**(inputs | wrong)).logits, pack["shift_labels"])
        assert (loss / count - expected).abs() > 1e-4, wrong.keys()
