"""Batches of samples of a diffusers model, cut and joined."""

from typing import Any

import numpy as np
import pytest
import torch

from bascule.diffusers.balanced_model import batch_of, samples_in
from bascule.diffusers.split_table import SplitTable
from bascule.errors import ConfigError

BATCH: dict[str, Any] = {
    "hidden_states": torch.arange(24.0).view(3, 4, 2),
    "timestep": torch.tensor([0.1, 0.2, 0.3]),
    "img_ids": torch.zeros(4, 3),
    "grid": np.arange(4),
    "of_layers": torch.arange(30.0).view(2, 3, 5),
    "captions": [torch.zeros(2), torch.ones(4), torch.ones(1)],
    "img_shapes": [[(1, 2, 2)], [(1, 2, 2)], [(1, 2, 2)]],
    "joint_attention_kwargs": {"scale": 1.0},
    "return_dict": False,
}
UNBATCHED = ("img_ids", "grid")
TABLE = SplitTable(
    *((), {}, {}, {}), unbatched=UNBATCHED, listed=("captions",), batch_dims={"of_layers": 1}
)


def test_a_batch_is_cut_into_views_and_joined_again() -> None:
    samples = samples_in(BATCH, TABLE)
    assert len(samples) == 3 and all(sample.keys() == BATCH.keys() for sample in samples)
    for place, sample in enumerate(samples):
        assert torch.equal(sample["of_layers"], BATCH["of_layers"][:, place : place + 1])
        assert len(sample["captions"]) == 1 and sample["captions"][0] is BATCH["captions"][place]
        for name in ("hidden_states", "timestep"):
            assert torch.equal(sample[name], BATCH[name][place : place + 1])
            storage = BATCH[name].untyped_storage().data_ptr()
            assert sample[name].untyped_storage().data_ptr() == storage
        assert sample["img_shapes"] == [[(1, 2, 2)]]
        for name in (*UNBATCHED, "joint_attention_kwargs", "return_dict"):
            assert sample[name] is BATCH[name]
    joined = batch_of(samples, TABLE)
    assert joined.keys() == BATCH.keys()
    for name, value in BATCH.items():
        is_array = isinstance(value, torch.Tensor | np.ndarray)
        assert (joined[name] == value).all() if is_array else joined[name] == value


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (BATCH | {"timestep": torch.ones(2)}, "'img_shapes': 3, 'of_layers': 3, 'timestep': 2}"),
        (BATCH | {"img_shapes": [1, 2]}, "'img_shapes': 2"),
        (
            BATCH | {"timestep": np.ones(3)},
            r"'timestep' is a numpy array of shape \(3,\): give",
        ),
        (BATCH | {"guidance": torch.ones(())}, "'guidance' of a batch is a tensor without a batch"),
        ({"img_ids": torch.zeros(4, 3), "return_dict": False}, r"of a batch have \{\} samples"),
    ],
    ids=["two numbers", "a shorter list", "numpy", "one number", "no number"],
)
def test_batches_that_are_refused(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        samples_in(batch, TABLE)
