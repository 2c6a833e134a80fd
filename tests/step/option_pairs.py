"""What each option of a private training changes, and the noise of any two of them together.

A new option is one more line of `OPTIONS`: the tests then try it with every other. A training takes
several options at once, so that few trainings hold all pairs.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import scipy.linalg
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS, FrontEnd
from tfdp.clipping import AdaptiveQuantileClipping, TermWiseAggregation, TwoTermLoss

N, BATCH, CLIP, NOISE, STEPS, CYCLE, UNITS = 64, 8, 0.5, 1.5, 8, 4, 8000
BAND = tfdp.BandedNoise([3.0, 2.0, 1.0])
ADAPTIVE = AdaptiveQuantileClipping(learning_rate=0.4, count_noise=2.0)
GROUPS = TermWiseAggregation(batch_clip=0.3, num_groups=4)
SCHEDULE = tfdp.schedules.PiecewiseConstantNoise([1, 2], [2.0, 1.4, 1.0])
X, Y = np.random.default_rng(0).normal(size=[N, 4]).astype("float32"), np.zeros(N, "int64")


@dataclasses.dataclass(frozen=True)
class Option:
    """Arguments that an option gives: two that give the same one are no pair.

    Attributes:
      batches: Of `poisson_batches`.
      optimizer: Of the optimizer.
      model: Of `compile`, and of `Training`.
      needs: Of `poisson_batches`, unless another option gives them.
    """

    batches: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    needs: dict[str, Any] = dataclasses.field(default_factory=dict)


OPTIONS = {
    "schedule": Option(optimizer={"noise_multiplier": SCHEDULE}),
    "cycles": Option({"cycle_length": CYCLE}),
    "correlated": Option({"cycle_length": CYCLE}, {"noise_correlation": BAND}),
    "adaptive": Option(optimizer={"clipping_rule": ADAPTIVE}),
    "per layer": Option(optimizer={"clipping_rule": "per_layer"}),
    "chunks": Option({"chunk_size": 16}),
    "users": Option({"privacy_unit": np.arange(N) // 2, "examples_per_user": 2}),
    "augmentations": Option({"augmentations": 2}),
    "secure": Option(optimizer={"secure_noise": True}, needs={"padding": "full"}),
    "unpadded": Option({"padding": "none"}),
    "buckets": Option({"padding": "buckets"}),
    "full": Option({"padding": "full"}),
    "replicas": Option(model={"replicas": 2}),
    "selective": Option(model={"selective": True}),
    "decay": Option(optimizer={"weight_decay": 0.1}),
    "top k": Option(optimizer={"compression": tfdp.contrib.TopK(0.2)}),
    "masks": Option(optimizer={"compression": tfdp.contrib.RandomMask(0.5, by="coordinate")}),
    "microbatches": Option(optimizer={"num_microbatches": 4}),
    "vectorized": Option(optimizer={"engine": "vectorized"}),
    "groups": Option(model={"groups": True}),
    "Adam": Option(model={"cls": "Adam"}),
    "SignSGD": Option(model={"cls": "SignSGD"}),
    "AdamBC": Option(model={"cls": "AdamBC"}),
    "xla": Option(model={"jit_compile": True}, needs={"padding": "full"}),
}


# What is used of the noise is compared with what is recorded in trainings without these alone.
_CHANGES_THE_UPDATE = {"decay", "top k", "masks", "Adam", "SignSGD", "AdamBC"}
# What is left out of sets, and how many options they have. Many together, XLA compiles for minutes.
_SETS = ((_CHANGES_THE_UPDATE | {"xla"}, 7), ({"xla"}, 7), (_CHANGES_THE_UPDATE, 4), (set(), 4))


def pairs() -> Iterator[tuple[str, ...]]:
    """Names of any two options that give no argument both."""
    for first, second in itertools.combinations(OPTIONS, 2):
        one, other = OPTIONS[first], OPTIONS[second]
        places = ((one.batches, other.batches), (one.optimizer, other.optimizer))
        if not any(set(a) & set(b) for a, b in (*places, (one.model, other.model))):
            yield first, second


def sets_of(allowed: Collection[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns sets of options, any two of which are allowed together: every pair is in one.

    Pairs of options that leave the update alone are together with such options only.
    """
    sets: list[tuple[str, ...]] = []
    left = list(allowed)
    for left_out, most in _SETS:
        names = set(OPTIONS) - left_out
        todo = {pair for pair in left if set(pair) <= names}
        while todo:
            chosen = set(min(todo, key=_places))
            while len(chosen) < most:
                gains = {
                    name: len(new & todo)
                    for name in OPTIONS
                    if name in names - chosen
                    and (new := {_in_order((name, one)) for one in chosen}) <= set(allowed)
                }
                best = max(gains, key=gains.__getitem__, default=None)
                if best is None or gains[best] == 0:
                    break
                chosen.add(best)
            sets.append(_in_order(chosen))
            todo -= set(itertools.combinations(sets[-1], 2))
        left = [pair for pair in left if not any(set(pair) <= set(one) for one in sets)]
    return sets


def _places(names: Iterable[str]) -> list[int]:
    return [list(OPTIONS).index(name) for name in names]


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in OPTIONS if name in set(names))


def front_of(names: tuple[str, ...]) -> FrontEnd:
    """The Keras that tries options: each tries about half of the sets."""
    return FRONT_ENDS[sum(_places(names)) // len(names) % len(FRONT_ENDS)]


@dataclasses.dataclass
class Measured:
    """The noise of each step, and what is stated of it.

    Attributes:
      noise: Of each step, in the sum of clipped gradients, `[steps, coordinates]`; where it is
        correlated, the independent noise of which it was made.
      stddevs: The standard deviation that the ledger, the clip and the sensitivity state for it.
      optimizer: The optimizer.
    """

    noise: np.ndarray
    stddevs: np.ndarray
    optimizer: Any


class Training:
    """A training without gradients: what it releases is noise alone."""

    def __init__(self, front: FrontEnd, options: list[Option], steps: int = STEPS):
        merged: dict[str, dict[str, Any]] = {}
        for field in ("needs", "batches", "optimizer", "model"):
            merged[field] = {k: v for option in options for k, v in getattr(option, field).items()}
        self.front, self.steps, self.given = front, steps, merged
        kind, self.batches_given = merged["model"], {**merged["needs"], **merged["batches"]}
        self.replicas = kind.pop("replicas", 1)
        self.selective, self.groups = kind.pop("selective", False), kind.pop("groups", False)
        self.cls = kind.pop("cls", "SGD")
        self.strategy = tf.distribute.get_strategy()
        if self.replicas > 1:
            self.strategy = support.mirrored(self.replicas)
        self.batches = self._batches()
        with self.strategy.scope():
            self.model = self._model()
            self.optimizer = self._optimizer()
            self.recorded = _record(self.optimizer)
            loss = None if self.groups else _nothing
            self.model.compile(optimizer=self.optimizer, loss=loss, **kind)

    def _batches(self) -> Any:
        given = {"expected_batch_size": BATCH, "steps_per_epoch": self.steps, **self.batches_given}
        if self.replicas == 1:
            return tfdp.data.poisson_batches((X, Y), **given)
        return tfdp.data.distributed_poisson_batches(
            self.strategy,
            lambda part, count: (X[part::count], Y[part::count]),
            dataset_size=N,
            **given,
        )

    def _optimizer(self) -> Any:
        given = {"noise_multiplier": NOISE, "sampling": self.batches.sampling}
        if self.selective:
            given |= {"validation_batch_size": 8, "validation_noise_multiplier": 1.0}
            given |= {"threshold": 1e3}  # Every attempt is accepted.
        name = f"{'DPSUR' if self.selective else 'DP'}{self.cls}"
        given = {**given, "learning_rate": 1.0, **self.given["optimizer"]}
        return getattr(self.front.tfdp, name)(CLIP, **given)

    def _model(self) -> Any:
        keras = self.front.keras
        dense = keras.layers.Dense(UNITS, kernel_initializer="zeros")
        inputs = keras.Input([4])
        cls = _of_groups(keras) if self.groups else keras.Model
        model = cls(inputs, dense(inputs))
        return self.front.tfdp.SelectiveModel(model) if self.selective else model

    def fit(self) -> Measured:
        """Trains, and returns the noise of each step."""
        noise, clips, weights = [], [], [self._weights()]

        def begin(batch: int, logs: Any = None) -> None:
            clips.append(self.optimizer.current_l2_norm_clip)

        def end(batch: int, logs: Any = None) -> None:
            count, value = self.recorded
            if int(count) > len(noise):
                noise.append(value.numpy())
                weights.append(self._weights())
            else:  # A part of a logical batch.
                clips.pop()

        callback = self.front.keras.callbacks.LambdaCallback(
            on_train_batch_begin=begin, on_train_batch_end=end
        )
        chunks = self.optimizer.gradient_accumulation_steps
        steps = {"steps_per_epoch": chunks * self.steps} if self.replicas > 1 else {}
        self.model.fit(self.batches, callbacks=[callback], verbose=0, **steps)
        found = np.array(noise)
        if self.cls == "SGD" and not {"weight_decay", "compression"} & set(self.given["optimizer"]):
            divisor = self.given["optimizer"].get("num_microbatches", BATCH)
            moved = -np.diff(np.array(weights), axis=0)  # What is recorded is what is used.
            np.testing.assert_allclose(moved * divisor, found, atol=1e-4 * CLIP)
        if "noise_correlation" in self.given["optimizer"]:
            column = np.pad(BAND.coefficients, (0, len(found)))[: len(found)]
            found = scipy.linalg.toeplitz(column, np.zeros(len(found))) @ found
        return Measured(found, self.stated(np.array(clips)), self.optimizer)

    def stated(self, clips: np.ndarray) -> np.ndarray:
        """Returns the standard deviation of each step's noise by the ledger, `[steps]`."""
        ledger, cycle = self.optimizer.ledger, self.optimizer.sampling.cycle_length
        per_release = [_noise_of(r.event) for r in ledger.releases for _ in range(r.count)]
        noise = np.repeat(per_release, cycle)[: len(clips)]
        if self.groups:
            return noise * (CLIP + BATCH / GROUPS.num_groups * 2 * GROUPS.batch_clip)
        if "num_microbatches" in self.given["optimizer"]:
            return noise * 2 * CLIP
        if self.given["optimizer"].get("clipping_rule") == ADAPTIVE:
            return clips / np.sqrt(noise**-2 - (2 * ADAPTIVE.count_noise) ** -2)
        return noise * CLIP

    def _weights(self) -> np.ndarray:
        return support.flat([w.numpy() for w in self.model.trainable_variables])


def _noise_of(event: Any) -> float:
    event = getattr(event, "update", event)  # Set in a selective release.
    return getattr(event, "event", event).noise_multiplier


def _nothing(y: Any, outputs: Any) -> tf.Tensor:
    return 0.0 * tf.reduce_sum(outputs, axis=-1)


def _of_groups(keras: Any) -> type:
    """A model whose loss has a batch-wise term, in which each of its variables is."""

    class OfGroups(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, *weights = data

            def batch_wise(x: tf.Tensor, y: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
                return tf.reduce_sum(tf.where(mask, _nothing(y, self(x)), 0.0))

            loss = TwoTermLoss(
                lambda x, y: _nothing(y, self(x)),
                batch_wise,
                (x, y),
                GROUPS,
                mask=tf.cast(weights[0], tf.bool) if weights else None,
            )
            self.optimizer.minimize(loss, self.trainable_variables)
            return {"released": tf.constant(1.0)}

    return OfGroups


def _record(optimizer: Any) -> tuple[tf.Variable, tf.Variable]:
    """Has an optimizer record its noisy sums: how many there were, and the last one."""
    with tf.device("cpu"), tfdp.step.state.plain_variables():
        count = tf.Variable(0, dtype=tf.int64, trainable=False)
        value = tf.Variable(tf.zeros([5 * UNITS]), trainable=False)
    add_noise = optimizer._add_noise

    def recorded(total: Any, step: Any) -> list:
        noisy = add_noise(total, step)
        flat = tf.concat([tf.reshape(tf.cast(n, tf.float32), [-1]) for n in noisy], axis=0)
        value.assign(flat)
        if tfdp.step.replicas.index() == 0:
            count.assign_add(1)
        return noisy

    optimizer._add_noise = recorded
    return count, value


def measured(names: tuple[str, ...], front: FrontEnd | None = None, steps: int = STEPS) -> Measured:
    """Trains with options."""
    front = front or front_of(names)
    return Training(front, [OPTIONS[name] for name in names], steps).fit()


# The standard deviation of the normal numbers is known to 0.35%. The tolerance is 7 times that, and
# what secure noise may add. Noise that is off by 5% is caught: it is another 7 times that away.
TOLERANCE = 0.025 + 0.002


def assert_as_stated(found: Measured, steps: int = STEPS) -> None:
    """Each step has the noise that is stated, and noise of its own."""
    assert len(found.noise) == steps and len(found.stddevs) == steps
    ratios = found.noise.std(axis=1) / found.stddevs
    assert np.all(np.abs(ratios - 1) < TOLERANCE), ratios.round(3)
    kernel, bias = found.noise[:, :UNITS], found.noise[:, -UNITS:]
    for first, second in [
        *zip(found.noise, found.noise[1:], strict=False),
        *zip(kernel, bias, strict=True),
    ]:
        assert abs(np.corrcoef(first, second)[0, 1]) * np.sqrt(len(first)) < 7
