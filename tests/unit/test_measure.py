"""How blocks are timed: the first run of a length warms up, the median of the others counts."""

from unittest import mock

import torch

from bascule.models import MMDiT, MMDiTConfig
from bascule.train import model as timing

CONFIG = MMDiTConfig(
    in_channels=4,
    text_dim=4,
    vec_dim=4,
    d_model=8,
    num_heads=1,
    num_double=1,
    num_single=1,
    axes_dim=(2, 2, 4),
)


def test_the_first_run_is_left_out_and_the_last_is_not() -> None:
    model = MMDiT(CONFIG)
    times = iter([0.0, 5.0, 7.0, 9.0, 900.0, 30.0, 20.0, 10.0, 70.0, 1.0, 2.0, 3.0])
    with mock.patch.object(timing, "seconds_of", lambda *_: next(times)):
        seconds = timing.pack_seconds(model, (2, 3, 5), [5, 3], torch.float32, None, 3)
    assert seconds == 2 * 7.0 + 3 * 20.0 + 5 * 2.0
    assert next(times, None) is None
