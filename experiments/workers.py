"""Processes of this machine that train together, over the loopback interface."""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

CLUSTER = "TF_CONFIG"  # The environment variable by which TensorFlow knows what to be.


def start(commands: Sequence[Sequence[str]], options: Sequence[dict[str, Any]]) -> list:
    """Starts the workers of one cluster.

    Args:
      commands: The command line of each.
      options: Further arguments of `subprocess.Popen` for each.

    Returns:
      The processes.
    """
    places = clusters(len(commands))
    return [
        subprocess.Popen(command, env={**os.environ, CLUSTER: place}, **others)
        for command, others, place in zip(commands, options, places, strict=True)
    ]


def clusters(*sizes: int) -> list[str]:
    """Returns what `CLUSTER` must be for each worker of new clusters of these sizes."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(sum(sizes))]
    places = []
    for size in sizes:
        own, addresses = addresses[:size], addresses[size:]
        for index in range(size):
            task = {"type": "worker", "index": index}
            places.append(json.dumps({"cluster": {"worker": own}, "task": task}))
    return places


def index() -> int | None:
    """Returns which worker this process is, or None if it is not one."""
    cluster = os.environ.get(CLUSTER)
    return None if cluster is None else int(json.loads(cluster)["task"]["index"])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
