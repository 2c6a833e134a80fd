"""Training of Keras 3 on the batches of several replicas."""

from collections.abc import Callable
from typing import Any

from tfdp.base import private_apis


def let_keras_fit_distributed_batches() -> None:
    """Has Keras 3 build models for `distributed_poisson_batches` without drawing a batch.

    Before it trains under a distribution strategy, Keras takes a batch and averages it over the
    replicas, to learn shapes and types. Poisson samples of replicas are not of one size, and masks
    cannot be averaged; and a draw would be lost. Other data sets are not concerned.
    """

    def building(build: Callable[..., None]) -> Callable[..., None]:
        def build_with_specs(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
            batches = getattr(iterator, "_distributed_dataset", None)
            spec = getattr(batches, "local_element_spec", None)
            if spec is None:
                build(self, iterator=iterator, data_batch=data_batch)
            else:
                build(self, data_batch=spec)

        return build_with_specs

    private_apis.replace(
        "keras.src.backend.tensorflow.trainer.TensorFlowTrainer._maybe_symbolic_build", building
    )
