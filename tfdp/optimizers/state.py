"""The state of a private optimizer: what checkpoints and saved models hold of it."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdp.optimizers.adaptive_clip import AdaptiveClip
from tfdp.optimizers.release_count import COUNTS, ReleaseCount

if TYPE_CHECKING:
    from tensorflow.keras.optimizers.legacy import Optimizer as _Optimizer
else:
    _Optimizer = object


class PersistentState(_Optimizer):
    """Creates, saves and restores slots, iterations, the ledger's counts and an adaptive clip."""

    _released: ReleaseCount
    _adaptive: AdaptiveClip | None
    _state_to_load: dict[str, Any]

    def _create_all_weights(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_all_weights(var_list)
        if not self._released.created:
            self._weights.extend(self._released.create(self.add_weight))
            if self._adaptive is not None:
                self._weights.extend(self._adaptive.create(self.add_weight))
        if self._state_to_load:
            state, self._state_to_load = self._state_to_load, {}
            self._assign_state(state)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the state now, not at the first step, so that a checkpoint can be restored.

        Args:
          var_list: The variables that will be trained: `model.trainable_variables`.
        """
        with tf.init_scope():
            self._create_all_weights(list(var_list))

    def released_steps(self) -> tuple[int, int]:
        """Logical steps taken so far: on Poisson batches, and on others."""
        if self._state_to_load:
            self._released.check_parameters(self._state_to_load["privacy_parameters"])
            steps, not_poisson = (int(self._state_to_load[name]) for name in COUNTS)
            return steps, not_poisson
        return self._released.counts()

    def save_own_variables(self, store: Any) -> None:
        """Writes the state into a `.keras` file: slots, iterations and ledger."""
        for key, variable in self._named_state().items():
            store[key] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Takes the state back; it is assigned when the variables are created.

        Raises:
          PrivacyParametersChangedError: The state is of other privacy parameters.
        """
        state = {key: store[key][()] for key in store}
        if not state:
            return
        self._released.check_parameters(state["privacy_parameters"])
        if self._released.created:
            self._assign_state(state)
        else:
            self._state_to_load = state

    def _assign_state(self, state: dict[str, Any]) -> None:
        for key, variable in self._named_state().items():
            variable.assign(state[key])

    def _named_state(self) -> dict[str, tf.Variable]:
        """Every variable of the state: the ledger's by name, the others by their order."""
        ledger = self._released.variables
        others = [v for v in self.weights if all(v is not known for known in ledger.values())]
        return {**ledger, **{str(i): v for i, v in enumerate(others)}}

    def restore_from_saved_model(self, model: tf.keras.Model, path: str) -> None:
        """Restores the state that Keras saved with `model` but does not restore itself."""
        self.build(model.trainable_variables)  # So that the ledger knows at once.
        prefix = os.path.join(path, "variables", "variables")
        tf.train.Checkpoint(root=model).restore(prefix).expect_partial()
