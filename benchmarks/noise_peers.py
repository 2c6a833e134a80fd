"""A process that adds the noise of another library, on the orders of `benchmarks.noise`.

`python -m benchmarks.noise_peers NAME PARAMETERS` runs in a Python that has the library. It writes
a JSON object when it is ready, or with the reason why not. Then it reads numbers, one a line, and
answers each with the seconds that so many additions of noise took.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable

from benchmarks.worker import describe


def opacus(size: int) -> Callable[[], object]:
    """Returns a function that adds noise as Opacus does with `secure_mode=True`.

    The generator is PyTorch's. Opacus takes that of `torchcsprng`, which is no longer maintained.
    """
    import torch
    from opacus.optimizers.optimizer import _generate_noise

    total = torch.zeros(size)
    return lambda: total + _generate_noise(1.0, total, secure_mode=True)


def jax_privacy(size: int) -> Callable[[], object]:
    """Returns a function that adds the Gaussian noise of JAX-Privacy.

    Its releases have no discrete Gaussian, and no secure noise.
    """
    import jax
    from jax_privacy import noise_addition

    total = jax.numpy.zeros(size)
    privatizer = noise_addition.gaussian_privatizer(stddev=1.0)
    update = jax.jit(privatizer.update)
    state = privatizer.init(total)

    def add() -> object:
        nonlocal state
        noisy, state = update(total, state)
        return jax.block_until_ready(noisy)

    return add


PEERS = {"opacus": opacus, "jax_privacy": jax_privacy}


def main() -> None:
    """Serves on standard input and output; what libraries print goes to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: object) -> None:
        print(json.dumps(message), file=channel, flush=True)

    name, size = sys.argv[1], int(sys.argv[2])
    try:
        add = PEERS[name](size)
        add()
    except ImportError as error:
        answer({"reason": f"not installed: {error}"})
        return
    except Exception as error:
        answer({"reason": f"failed: {describe(error)}"})
        return
    answer({"version": importlib.metadata.version(name)})
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            add()
        answer({"seconds": time.perf_counter() - begin})


if __name__ == "__main__":
    main()
