"""Batches of samples of a diffusers model, cut and joined."""

from typing import Any

import numpy as np
import pytest
import torch

from bascule.diffusers.samples import (
    batch_of,
    check_sample,
    samples_in,
)
from bascule.errors import ConfigError

BATCH: dict[str, Any] = {
    "hidden_states": torch.arange(24.0).view(3, 4, 2),
    "timestep": torch.tensor([0.1, 0.2, 0.3]),
    "img_ids": torch.zeros(4, 3),
    "img_shapes": [[(1, 2, 2)], [(1, 2, 2)], [(1, 2, 2)]],
    "joint_attention_kwargs": {"scale": 1.0},
    "return_dict": False,
}
UNBATCHED = ("img_ids",)


def test_a_batch_is_cut_into_views_and_joined_again() -> None:
    samples = samples_in(BATCH, UNBATCHED)
    assert len(samples) == 3 and all(sample.keys() == BATCH.keys() for sample in samples)
    for place, sample in enumerate(samples):
        for name in ("hidden_states", "timestep"):
            assert torch.equal(sample[name], BATCH[name][place : place + 1])
            storage = BATCH[name].untyped_storage().data_ptr()
            assert sample[name].untyped_storage().data_ptr() == storage
        assert sample["img_ids"] is BATCH["img_ids"]
        assert sample["img_shapes"] == [[(1, 2, 2)]]
        assert sample["return_dict"] is False and sample["joint_attention_kwargs"] == {"scale": 1.0}
    joined = batch_of(samples, UNBATCHED)
    assert joined.keys() == BATCH.keys()
    for name, value in BATCH.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(joined[name], value) if is_tensor else joined[name] == value


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"timestep": torch.ones(2)}, "'timestep' of a batch has 2 samples, and 'hidden_states'"),
        ({"img_shapes": [1, 2]}, "'img_shapes' of a batch has 2 samples"),
        ({"timestep": np.ones(3)}, r"'timestep' is an array of numpy of the shape \(3,\): give"),
        ({"captions": np.array(["a", "b", "c"])}, "'captions' is an array of numpy"),
        ({"guidance": torch.tensor(3.5)}, "'guidance' of a batch is a tensor of one number"),
    ],
)
def test_what_is_no_batch_is_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        samples_in(BATCH | changed, UNBATCHED)


def test_arrays_of_numpy_are_in_no_sample() -> None:
    sample = {"hidden_states": torch.ones(1, 4, 2), "noise": np.ones((1, 4))}
    with pytest.raises(ConfigError, match=r"'noise' is an array of numpy of the shape \(1, 4\)"):
        check_sample(sample, (), UNBATCHED)
    check_sample(sample, (), ("noise",))
    whole = samples_in(BATCH | {"grid": np.arange(4)}, (*UNBATCHED, "grid"))
    assert all((each["grid"] == np.arange(4)).all() for each in whole)


def test_a_batch_of_nothing_has_no_number_of_samples() -> None:
    with pytest.raises(ConfigError, match="a batch without tensors"):
        samples_in({"img_ids": torch.zeros(4, 3), "return_dict": False}, UNBATCHED)
