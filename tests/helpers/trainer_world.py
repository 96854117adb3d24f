"""The world of a Trainer."""

import os
import socket

import torch.distributed as dist


def join_world() -> None:
    """What torchrun would have set; accelerate reads it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port = [0]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0])}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "ACCELERATE_USE_CPU": "true"}
