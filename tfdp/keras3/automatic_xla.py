"""Choice of XLA for steps of Keras 3 whose `compile` leaves it open (`jit_compile="auto"`)."""

from collections.abc import Callable
from typing import Any

from tfdp.accounting.sampling import NONE
from tfdp.base import private_apis
from tfdp.step.private_step import PrivateStep


def keep_varying_batches_from_xla() -> None:
    """Keeps Keras 3 from compiling private steps whose number of rows varies.

    Where there is a GPU, Keras has XLA compile every training step unless `compile` says otherwise.
    XLA compiles a step anew for each number of rows, which takes seconds to a minute. So steps on
    Poisson batches without padding, and steps with `sparse_embeddings`, are not compiled. Other
    optimizers behave as before. With `jit_compile=True`, such a step is refused.
    """

    def resolving(resolve: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def resolve_for_batches(self: Any) -> bool:
            optimizer = getattr(self, "optimizer", None)
            if not isinstance(optimizer, PrivateStep):
                return resolve(self)
            if optimizer.sparse_embeddings is not None:  # How many rows are updated varies.
                return False
            sampling = optimizer.sampling
            return (sampling is None or sampling.padding != NONE) and resolve(self)

        return resolve_for_batches

    private_apis.replace("keras.src.trainers.trainer.Trainer._resolve_auto_jit_compile", resolving)
