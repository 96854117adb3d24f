"""Requests of a pipeline of diffusers on blocks of ranks, which they change between steps."""

from bascule.serve.engine import Block as Block
from bascule.serve.engine import Controller as Controller
from bascule.serve.engine import Engine as Engine
from bascule.serve.engine import Event as Event
