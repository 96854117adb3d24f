"""Parts of the batch of a call."""

from typing import Any

import pytest
import torch

from bascule.errors import ConfigError
from bascule.integrations.diffusers.pipelines.batch_shares import batch_of, share_of

NAMES = ("x", "text", "ids", "residuals", "shapes", "layers", "scale")


def given(batch: int) -> dict[str, Any]:
    return {
        "text": torch.arange(batch * 2).view(batch, 2),
        "ids": torch.zeros(batch, 3),  # without a batch
        "residuals": [torch.arange(batch), torch.arange(batch) * 10],
        "shapes": [[(1, place, 2)] for place in range(batch)],
        "layers": list(range(batch)),
        "scale": torch.tensor(2.0),
    }


def test_samples_are_cut_and_the_rest_is_for_all() -> None:
    x, kwargs = torch.arange(3), given(3)
    assert batch_of(NAMES, (x,), kwargs, ("ids",)) == 3
    (own,), cut = share_of(NAMES, (x,), kwargs, ("ids",), (3, slice(1, 3)))
    assert own.tolist() == [1, 2] and cut["text"].tolist() == [[2, 3], [4, 5]]
    assert [one.tolist() for one in cut["residuals"]] == [[1, 2], [10, 20]]
    assert cut["shapes"] == [[(1, 1, 2)], [(1, 2, 2)]]
    assert cut["layers"] == [0, 1, 2]  # numbers of layers, not of samples
    assert cut["ids"] is kwargs["ids"] and cut["scale"] is kwargs["scale"]


def test_lists_with_a_tensor_for_each_sample() -> None:
    images = [torch.zeros(4, 8, side) for side in (2, 3, 5)]
    assert batch_of(NAMES, (images,), {}, ()) == 3
    (own,), _ = share_of(NAMES, (images,), {}, (), (3, slice(0, 2)))
    assert [one.shape[-1] for one in own] == [2, 3]


def test_what_is_for_all_samples_is_not_cut() -> None:
    cut = share_of(NAMES, (torch.zeros(2, 3),), {"text": torch.ones(1, 3)}, (), (2, slice(0, 1)))[1]
    assert cut["text"].shape == (1, 3)
    assert batch_of(NAMES, (), {"scale": 2.0, "layers": [1, 2]}, ()) == 1


def test_other_numbers_of_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"text has the shape \(3, 2\) in a call of 2 samples"):
        share_of(NAMES, (torch.zeros(2),), {"text": torch.zeros(3, 2)}, (), (2, slice(0, 1)))
