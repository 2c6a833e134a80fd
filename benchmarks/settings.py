"""StepSettings that tell a worker which steps to take."""

import dataclasses


class Unsupported(Exception):
    """A framework cannot run what was asked for; the message says why."""


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """StepSettings of a contestant's training.

    Attributes:
      batch: Rows of a batch; with `dataset_size`, the expected number of examples.
      batches: Number of different batches, which are taken in turn.
      jit_compile: Whether Keras compiles the step with XLA.
      dataset_size: Number of examples that Poisson batches are drawn from; None: fixed batches.
      chunk_size: Rows that a Poisson batch is delivered in; None: all at once.
      keras: Version of Keras, 2 or 3.
    """

    batch: int
    batches: int = 4
    jit_compile: bool = False
    dataset_size: int | None = None
    chunk_size: int | None = None
    keras: int = 2
