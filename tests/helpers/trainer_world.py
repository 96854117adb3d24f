"""The world of a Trainer."""

import os

from tests.helpers.jobs import set_variables


def join_world() -> None:
    """What torchrun would have set; accelerate reads it."""
    set_variables()
    os.environ["ACCELERATE_USE_CPU"] = "true"
