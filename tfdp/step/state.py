"""The state of a private optimizer: what checkpoints and saved models hold of it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.tf.workers import check_alike, gathered
from tfdp.step.adaptive_clip import AdaptiveClip
from tfdp.step.record import lineage
from tfdp.step.record.record_table import NOT_POISSON, STEPS
from tfdp.step.record.release_count import RECORD, ReleaseRecord

if TYPE_CHECKING:
    from tfdp.step.compression import Compressor


class PersistentState:
    """State that is saved and restored: slots, iterations, record, adaptive clip, memory."""

    _released: ReleaseRecord
    _adaptive: AdaptiveClip | None
    _compressor: "Compressor | None"
    _state_to_load: dict[str, Any]

    def _state_variables(self) -> list[tf.Variable]:
        """Returns all variables of the optimizer that are saved, in their order."""
        raise NotImplementedError

    def _privacy_config(self) -> dict[str, Any]:
        """Returns the privacy parameters as arguments."""
        raise NotImplementedError

    def _create_record(self, add_weight: Callable[..., tf.Variable]) -> list[tf.Variable]:
        """Creates the variables of the record and of a clip that moves, if there are none yet.

        Args:
          add_weight: Creates a variable that the optimizer tracks, as in Keras 2.
        """
        if self._released.created:
            return []
        with plain_variables():  # Counted and moved once, for all replicas.
            created = self._released.create(add_weight)
            if self._adaptive is not None:
                created += self._adaptive.create(add_weight)
        return created

    def _create_memory(
        self, add_weight: Callable[..., tf.Variable], variables: Sequence[tf.Variable]
    ) -> list[tf.Variable]:
        """Creates the memory of a compression for variables that have none yet."""
        return [] if self._compressor is None else self._compressor.create(add_weight, variables)

    def _assign_loaded(self) -> None:
        """Assigns what was loaded before there were variables."""
        if self._state_to_load:
            state, self._state_to_load = self._state_to_load, {}
            self._assign_state(state)

    def _check_workers(self, variables: Sequence[tf.Variable]) -> None:
        """Checks that all workers of a distribution strategy train the same."""
        if not self._released.created and tf.distribute.has_strategy():
            facts = {type(self).__name__: self._worker_facts()}
            facts["variables"] = [(v.dtype.name, tuple(v.shape)) for v in variables]
            strategy = tf.distribute.get_strategy()
            check_alike(strategy, facts, "the optimizer")
            if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
                self._released.share_uids(gathered(strategy, lambda _: self._released.uids)[0])

    def _worker_facts(self) -> Any:
        return self._privacy_config()

    def _inherit_from_graph(self) -> None:
        """Takes over the cost of the variables that the graph being built has read."""
        self._released.reads(lineage.captured_variables())

    def released_steps(self) -> tuple[int, int]:
        """Returns the logical steps that the ledger covers: on unused Poisson batches, or not.

        With cyclic sampling, the first number is that of the cycles of steps that were begun.
        """
        self._check_state()
        steps, not_poisson = self._released.rows()[:, [STEPS, NOT_POISSON]].sum(axis=0)
        return int(steps), int(not_poisson)

    def own_steps(self) -> int:
        """Returns the logical steps that this optimizer has taken itself, in this process.

        With cyclic sampling, it is the number of cycles of steps that were begun.
        """
        return self._released.own_steps()

    def _check_state(self) -> None:
        loaded = self._state_to_load.get("privacy_parameters")
        self._released.check_parameters(loaded)

    def save_own_variables(self, store: Any) -> None:
        """Writes the state into a `.keras` file: slots, iterations and record."""
        self._released.refresh()
        state = dict(self._state_to_load)  # Loaded, but not yet assigned.
        if self._released.created:
            state = {key: variable.numpy() for key, variable in self._named_state().items()}
        elif state:
            state[RECORD] = self._released.rows()
        for key, value in state.items():
            store[key] = value

    def load_own_variables(self, store: Any) -> None:
        """Loads the state, which is assigned when the variables are created.

        Raises:
          PrivacyParametersChangedError: The state is of other privacy parameters.
          ValueError: The state has no record of what was released.
        """
        keys = store.keys()  # Keras 3's store cannot be iterated over.
        state = {key: store[key][()] for key in keys}
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
        own = self._named_state()
        if missing := [key for key in own if key != RECORD and key not in state]:
            raise ValueError(
                f"The saved state of {type(self).__name__} must be of as many variables as it has "
                f"now. Received: {len(state)} saved, of {len(own)}, without {missing}. Build it "
                "with the same variables and the same inner optimizer, or load the model with "
                "`compile=False`, and give what it has cost as `prior` to `make_private`."
            )
        for key, variable in own.items():
            if key != RECORD:  # It is merged, not overwritten.
                variable.assign(state[key])
        self._released.refresh()

    def _named_state(self) -> dict[str, tf.Variable]:
        """Returns every variable of the state: the ledger's by name, the others by their order."""
        ledger = self._released.variables
        others = [
            v for v in self._state_variables() if all(v is not known for known in ledger.values())
        ]
        return {**ledger, **{str(i): v for i, v in enumerate(others)}}
