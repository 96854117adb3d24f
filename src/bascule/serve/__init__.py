"""Requests of a pipeline of diffusers on blocks of ranks, which they change between steps.

Names load when they are first used, since options are parsed without torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.serve.blocks import Block as Block
    from bascule.serve.blocks import Event as Event
    from bascule.serve.controller import Controller as Controller
    from bascule.serve.engine import Engine as Engine

_HOMES = {"Block": "blocks", "Event": "blocks", "Controller": "controller", "Engine": "engine"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'bascule.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bascule.serve.{_HOMES[name]}"), name)
