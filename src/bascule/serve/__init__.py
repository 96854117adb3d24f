"""Requests of a pipeline of diffusers on blocks of ranks, which they change between steps."""

from bascule.serve.blocks import Block as Block
from bascule.serve.blocks import Event as Event
from bascule.serve.controller import Controller as Controller
from bascule.serve.engine import Engine as Engine
