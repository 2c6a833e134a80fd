"""The state of a private optimizer: what checkpoints and saved models hold of it."""

import copy
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdp._tf.plain_variables import plain_variables
from tfdp._tf.workers import check_alike
from tfdp.optimizers import lineage
from tfdp.optimizers.adaptive_clip import AdaptiveClip
from tfdp.optimizers.record_table import NOT_POISSON, STEPS
from tfdp.optimizers.release_count import RECORD, ReleaseRecord

if TYPE_CHECKING:
    from tensorflow.keras.optimizers.legacy import Optimizer as _Optimizer
else:
    _Optimizer = object


class PersistentState(_Optimizer):
    """Mixin that saves and restores slots, iterations, the record and an adaptive clip."""

    _released: ReleaseRecord
    _adaptive: AdaptiveClip | None
    _state_to_load: dict[str, Any]

    def _create_all_weights(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_all_weights(var_list)
        if not self._released.created:
            with plain_variables():  # Counted and moved once, for all replicas.
                self._weights.extend(self._released.create(self.add_weight))
                if self._adaptive is not None:
                    self._weights.extend(self._adaptive.create(self.add_weight))
        if self._state_to_load:
            state, self._state_to_load = self._state_to_load, {}
            self._assign_state(state)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the state now, not at the first step, so that a checkpoint can be restored.

        The ledger takes over what these variables have cost under other private optimizers.

        Args:
          var_list: The variables that will be trained: `model.trainable_variables`.
        """
        if not self._released.created and tf.distribute.has_strategy():
            facts = {type(self).__name__: self.get_config()}
            facts["variables"] = [(v.dtype.name, tuple(v.shape)) for v in var_list]
            check_alike(tf.distribute.get_strategy(), facts, "the optimizer")
        # A tf.function that sees variables being created is traced twice: it does not see these.
        with tf.init_scope() if tf.distribute.has_strategy() else plain_variables():
            self._create_all_weights(list(var_list))
            self._released.trains(var_list)

    def _inherit_from_graph(self) -> None:
        """Takes over what the variables have cost that the graph being built has read."""
        self._released.reads(lineage.captured_variables())

    def released_steps(self) -> tuple[int, int]:
        """Returns the logical steps that the ledger covers: on unused Poisson batches, or not."""
        self._check_state()
        steps, not_poisson = self._released.rows()[:, [STEPS, NOT_POISSON]].sum(axis=0)
        return int(steps), int(not_poisson)

    def own_steps(self) -> int:
        """Returns the logical steps that this optimizer has taken itself, in this process."""
        return self._released.own_steps()

    def _check_state(self) -> None:
        loaded = self._state_to_load.get("privacy_parameters")
        self._released.check_parameters(loaded)

    def save_own_variables(self, store: Any) -> None:
        """Writes the state into a `.keras` file: slots, iterations and record."""
        self._released.refresh()
        for key, variable in self._named_state().items():
            store[key] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Takes the state back; it is assigned when the variables are created.

        Raises:
          PrivacyParametersChangedError: The state is of other privacy parameters.
          ValueError: The state has no record of what was released.
        """
        state = {key: store[key][()] for key in store}
        if not state:
            return
        self._released.check_parameters(state["privacy_parameters"])
        if RECORD not in state:
            raise ValueError(
                f"The saved state of {type(self).__name__} has no `{RECORD}`: it was saved by an "
                f"older version of tfdp. Received: {sorted(state)}. Load the model with "
                "`compile=False`, and give what it has cost as `prior` to `privacy_statement` and "
                "`PrivacyBudget`."
            )
        self._released.absorb(np.array(state.pop(RECORD)))
        if self._released.created:
            self._assign_state(state)
        else:
            self._state_to_load = state

    def _assign_state(self, state: dict[str, Any]) -> None:
        for key, variable in self._named_state().items():
            if key != RECORD:  # It is merged, not overwritten.
                variable.assign(state[key])
        self._released.refresh()

    def _named_state(self) -> dict[str, tf.Variable]:
        """Returns every variable of the state: the ledger's by name, the others by their order."""
        ledger = self._released.variables
        others = [v for v in self.weights if all(v is not known for known in ledger.values())]
        return {**ledger, **{str(i): v for i, v in enumerate(others)}}

    def get_weights(self) -> list[np.ndarray]:
        """Returns the state as arrays, with what other optimizers have done to the variables."""
        self._released.refresh()
        return super().get_weights()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Takes over, before a checkpoint, what other optimizers have done to the variables."""
        if tf.executing_eagerly():
            self._released.refresh()
        return super()._trackable_children(save_type, **kwargs)

    def restore_from_saved_model(self, model: tf.keras.Model, path: str) -> None:
        """Restores the state that Keras saved with `model` but does not restore itself."""
        self.build(model.trainable_variables)  # So that the ledger knows at once.
        prefix = os.path.join(path, "variables", "variables")
        tf.train.Checkpoint(root=model).restore(prefix).expect_partial()

    def __copy__(self) -> "PersistentState":
        """Returns a copy that shares nothing: it draws other noise and counts for itself."""
        return copy.deepcopy(self)
