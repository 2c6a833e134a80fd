"""DPAGD: gradient descent that chooses its step sizes and its privacy budget as it goes.

An iteration (Lee and Kifer, 2018, Algorithm 2):

1. On a Poisson batch, the sum of clipped gradients is measured with Gaussian noise, of precision
   p = 1 / sigma^2 in units of the clip. (The paper's rho_ng is p / 2.)
2. On another Poisson batch, the losses of the weights w - a g / |g|, each example's clipped to
   [0, loss_clip], are summed for a = 0 and for `candidates` equally distant step sizes up to the
   largest; one is chosen by report-noisy-min. Unless it is 0, the step is taken.
3. If it is 0, the gradient was too noisy to lower the loss: the cost of a measurement grows by
   the factor 1 + budget_growth for the rest of the training, what is missing of its precision is
   measured on a fresh batch, the measurements are averaged by their precisions, and 2 is done
   again. (Without sampling the cost is proportional to p, as in the paper.)

After every `step_size_window` iterations the largest step size becomes 1.1 times the largest that
was chosen in them. It is at most `max_step_size`, which may fall with the iterations: a part of
each step is noise, and shorter last steps leave less of it. (In the paper it is a constant.)

Privacy. Whatever is chosen here is a function of what was released before, so that the budget is an
`RdpFilter`: the epsilon to report is its target. Each draw of a batch is a mechanism of its own:

- A measurement is a Poisson-sampled Gaussian mechanism; the one that raises the precision from p
  to p' has precision p' - p. On fresh batches nothing more is needed for a proof. It is also the
  cheaper way: on the same batch one would have to pay the difference of the costs of p' and p,
  which is larger than the cost of p' - p (at order 2 the cost of p is log(1 + q^2 (e^p - 1)):
  larger for a sum than the sum of the costs), and would not average the batches. Without
  sampling (a batch of all examples), the two are the same, and this is the algorithm of the paper.
- Report-noisy-min with Gumbel noise of scale loss_clip / selection_range picks candidate k with a
  probability proportional to exp(-selection_range * score_k / loss_clip). An example adds something
  in [0, loss_clip] to every score, so that this is a Poisson-sampled `BoundedRangeDpEvent`, whose
  cost is the smallest that holds. (It is drawn from these probabilities, in float64.)

Differences to the paper: batches are Poisson samples, not of fixed size, and not shared by 1 and
2; noise for report-noisy-min is Gumbel's instead of Laplace's, at a quarter of the cost; the
budget is that of a Renyi filter instead of zCDP, which knows no amplification by sampling; the
step whose size was chosen is the one taken (the public code takes the next smaller).

With `momentum` m, which the paper does not have, g is the velocity m v + mean instead of the noisy
mean of the clipped gradients, and becomes v when a step is taken. It is a function of what has been
released, and costs no privacy. The size that lowers the loss most now is too short for what comes
later: where the loss curves strongly, the gradient goes to and fro, and so do its best steps.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import tensorflow as tf

from tfdp.accounting.ledger import PrivacyParametersChangedError
from tfdp.accounting.privacy_filter import RdpFilter
from tfdp.accounting.sampling import (
    BUCKETS,
    FULL,
    NONE,
    TRUNCATION_PROBABILITY,
    PoissonSampling,
)
from tfdp.base.random import chacha
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.validation import error, instance, integer, is_integer
from tfdp.clipping import step_check
from tfdp.clipping.example_losses import per_example_losses
from tfdp.clipping.one_pass.one_pass_engine import OnePassEngine
from tfdp.contrib.descent_budget import DescentOptions, grown_precision, iteration_event
from tfdp.data.batches import PoissonBatches
from tfdp.data.elements import has_labels, parts_of
from tfdp.step.noise import add_gaussian_noise

_STEP_SIZE_GROWTH = 1.1
_PRIVACY_PARAMETERS = ("l2_norm_clip", "loss_clip", "selection_range", "selection_batch_size")


class AdaptiveGradientDescent(tf.Module):
    """Trains a Keras model by DPAGD until a privacy budget is spent.

    Formal guarantee: the weights at any time, and all of the state, are functions of releases that
    the budget has paid for before they were made.

    It is a `tf.Module`: `tf.train.Checkpoint(descent=descent)` saves its state with the model.
    Training resumes from a restored checkpoint with the budget spent by then. Whatever this process
    has spent since then stays spent, and what several processes spent after one checkpoint is added
    up where they meet: see `RdpFilter.resume`.

    Args:
      model: The model, whose weights are trained in place. It must compute the loss of an example
        from that example alone, and have no regularizers.
      loss: A Keras loss with `reduction="none"`.
      batches: Result of `tfdp.data.poisson_batches`: the data, in memory and without weights or
        `transform`, and the expected batch size of the gradients. Its `seed` is that of the
        sampling, and its `padding` that of both kinds of batches; "none" counts as "buckets". The
        time of an iteration depends on how many examples were sampled, unless it is "full".
      budget: The privacy budget.
      options: Clips, noise and steps; see `calibrate_descent`.
      noise_seed: For tests: makes the noise and the choices a function of it.

    Raises:
      ValueError: An argument does not fit the others.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> data = np.ones([200, 4], "float32"), np.arange(200) % 3
      >>> batches = tfdp.data.poisson_batches(data, expected_batch_size=50)
      >>> budget, noise_multiplier, selection_range = tfdp.contrib.calibrate_descent(
      ...     target_epsilon=2.0, delta=1e-4, dataset_size=200, expected_batch_size=50,
      ...     selection_batch_size=50, iterations=5,
      ... )
      >>> options = tfdp.contrib.DescentOptions(
      ...     l2_norm_clip=1.0, noise_multiplier=noise_multiplier, loss_clip=3.0,
      ...     selection_range=selection_range, selection_batch_size=50,
      ... )
      >>> model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(3)])
      >>> loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="none")
      >>> descent = tfdp.contrib.AdaptiveGradientDescent(model, loss, batches, budget, options)
      >>> descent.run(iterations=1) <= 1 and budget.spent_epsilon() <= 2.0
      True

    References:
      - Lee and Kifer, 2018, Concentrated Differentially Private Gradient Descent with Adaptive
        per-Iteration Privacy Budget (https://arxiv.org/abs/1808.09501).
    """

    def __init__(
        self,
        model: "tf.keras.Model",
        loss: "tf.keras.losses.Loss",
        batches: PoissonBatches,
        budget: RdpFilter,
        options: DescentOptions,
        noise_seed: int | None = None,
    ):
        super().__init__(name="adaptive_gradient_descent")
        if not (callable(model) and hasattr(type(model), "trainable_variables")):
            raise error("model", "a Keras model", model)
        if not callable(loss):
            raise error("loss", 'a Keras loss with `reduction="none"`', loss)
        requirement = "the result of `tfdp.data.poisson_batches`"
        instance("batches", batches, PoissonBatches, requirement)
        instance("budget", budget, RdpFilter, "a tfdp.accounting.RdpFilter")
        instance("options", options, DescentOptions, "a tfdp.contrib.DescentOptions")
        noise_seed = integer("noise_seed", noise_seed, optional=True)
        source, sampling = batches.source, batches.sampling
        _check_batches(batches)
        size = source.dataset_size
        if options.selection_batch_size > size:
            raise error(
                "selection_batch_size",
                f"at most {size}, the number of training examples",
                options.selection_batch_size,
            )
        x, y = tf.nest.map_structure(tf.identity, source.tensors()[:2])
        if not model.built:  # On zeros: a layer must not see an example when it is made.
            model(tf.nest.map_structure(lambda values: tf.zeros_like(values[:1]), x))
        if model.losses:
            raise ValueError(
                "Argument `model` must have no losses of its own, such as regularizers. Received "
                f"a model with {len(model.losses)}."
            )
        self.model = model
        self.options = options
        self.budget = budget
        self._loss = loss
        self._source = dataclasses.replace(source, data=(x, y))
        # With masks, by which a batch of no examples is told.
        padding = BUCKETS if sampling.padding == NONE else sampling.padding
        # The filter charges more for batches that are cut off: (1 + e^target_epsilon) times.
        rare = TRUNCATION_PROBABILITY
        self._sampling = dataclasses.replace(
            sampling, padding=padding, max_truncation_probability=rare
        )
        self._selection = PoissonSampling(
            size, options.selection_batch_size, padding=padding, max_truncation_probability=rare
        )
        self._engine = OnePassEngine(options.l2_norm_clip)
        self._engine.usual_rows = self._sampling.usual_batch_size
        if padding != FULL:  # Examples do not stand at random places.
            self._engine.streams = KeyStream(noise_seed, "layers")
        use = next(source.uses)
        self._learning = KeyStream(source.seed, f"iterations {use}: learning")
        self._testing = KeyStream(source.seed, f"iterations {use}: testing")
        self._noise, self._choice = KeyStream(noise_seed, "noise"), KeyStream(noise_seed, "choice")
        self._velocity = [
            _variable(tf.zeros(v.shape, _wide(v.dtype)), _wide(v.dtype))
            for v in model.trainable_variables
        ]
        self._precision = _variable(options.noise_multiplier**-2.0, tf.float64)
        self._largest_step = _variable(options.longest_step(0), tf.float64)
        self._largest_chosen = _variable(0.0, tf.float64)
        self._iterations = _variable(0, tf.int64)
        self._draws = _variable(0, tf.int64)
        self._saved = _variable("", tf.string)
        batch = tf.nest.map_structure(_open_spec, (x, y))
        spec = (*batch, tf.TensorSpec([None], tf.bool))
        self._clipped_sum = tf.function(self._traced_sum, input_signature=spec)
        self._clipped_loss = tf.function(self._traced_loss, input_signature=spec)
        self._save()

    @property
    def iterations(self) -> int:
        """Iterations that ended with a step."""
        return int(self._iterations.numpy())

    @property
    def noise_multiplier(self) -> float:
        """Noise of the next iteration's measurement, in units of the clip."""
        return float(self._precision.numpy() ** -0.5)

    @property
    def largest_step_size(self) -> float:
        """Length of the next iteration's longest candidate."""
        return float(self._largest_step.numpy())

    @property
    def finished(self) -> bool:
        """True if the budget allows no further iteration, or the longest step has length 0."""
        self._resume()
        if not self.largest_step_size:
            return True
        event, truncation = self._release(float(self._precision.numpy()))
        return not self.budget.can_afford(event, truncation_probability=truncation)

    def run(
        self,
        iterations: int | None = None,
        on_progress: Callable[["AdaptiveGradientDescent"], Any] | None = None,
    ) -> int:
        """Trains.

        Args:
          iterations: Iterations to make at most; None: until the budget is spent.
          on_progress: Called with this object after every iteration. Everything that it can see
            here has been released and paid for, but for the time that an iteration took: that is
            private unless batches have `padding="full"`.

        Returns:
          The number of iterations that were made; fewer than asked for if training is `finished`.
        """
        if iterations is not None and not (is_integer(iterations) and iterations >= 0):
            raise error("iterations", "a non-negative integer or None", iterations)
        self._resume()
        self._check_functions()
        made = 0
        while (iterations is None or made < iterations) and self.largest_step_size:
            if not self._iterate():
                break
            made += 1
            if on_progress is not None:
                on_progress(self)
        return made

    def _check_functions(self) -> None:
        """Raises a ValueError if a function of the data keeps something of it in a variable."""
        for function in (self._clipped_sum, self._clipped_loss):
            step_check.check_graph(function.get_concrete_function().graph)

    def _iterate(self) -> bool:
        """One iteration; whether the budget was enough for it."""
        try:
            precision = float(self._precision.numpy())
            if not self._pay(precision):
                return False
            sums = self._measure(precision)
            while not (chosen := self._step(sums)):
                grown = grown_precision(
                    self.budget,
                    self._sampling.sampling_probability,
                    precision,
                    self.options.budget_growth,
                )
                self._precision.assign(grown)
                missing = grown - precision
                if not self._pay(missing):
                    return False
                sums = average(sums, self._measure(missing), precision, missing)
                precision = grown
            self._adapt(chosen)
            return True
        finally:
            self._save()

    def _adapt(self, chosen: float) -> None:
        """Adapts the largest step size to those that were chosen."""
        self._iterations.assign_add(1)
        size, largest = self.largest_step_size, max(float(self._largest_chosen.numpy()), chosen)
        if self.iterations % self.options.step_size_window == 0:
            size, largest = _STEP_SIZE_GROWTH * largest, 0.0
        self._largest_step.assign(min(size, self.options.longest_step(self.iterations)))
        self._largest_chosen.assign(largest)

    # What is released, and what it costs.

    def _release(self, precision: float) -> tuple[dp_accounting.DpEvent, float]:
        """Returns a measurement and a choice, and the probability that a batch is truncated."""
        event = iteration_event(
            self._sampling, precision**-0.5, self._selection, self.options.selection_range
        )
        truncation = self._sampling.truncation_probability + self._selection.truncation_probability
        return event, truncation

    def _pay(self, precision: float) -> bool:
        event, truncation = self._release(precision)
        if not self.budget.can_afford(event, truncation_probability=truncation):
            return False
        self.budget.spend(event, truncation_probability=truncation)
        return True

    def _measure(self, precision: float) -> list[tf.Tensor]:
        """Returns the noisy sum of clipped gradients of a fresh batch, by variable."""
        stddev = precision**-0.5 * self._engine.sensitivity()
        return self._noisy_sum(tf.constant(stddev, tf.float32), self._next_draw())

    def _step(self, sums: Sequence[tf.Tensor]) -> float:
        """Takes the step whose size is chosen on a fresh batch, and returns that size."""
        return float(self._choose_and_step(list(sums), self._next_draw()).numpy())

    def _next_draw(self) -> tf.Tensor:
        return tf.identity(self._draws.assign_add(1))

    # The graphs.

    @tf.function
    def _noisy_sum(self, stddev: tf.Tensor, position: tf.Tensor) -> list[tf.Tensor]:
        key = self._learning.next_key(position)
        sums = self._clipped_sum(*self._source.draw(key, self._sampling))
        return add_gaussian_noise(sums, [stddev] * len(sums), self._noise.next_key(position))

    @tf.autograph.experimental.do_not_convert
    def _traced_sum(self, x: Any, y: Any, mask: tf.Tensor) -> list[tf.Tensor]:
        variables = self.model.trainable_variables
        losses = self._loss(y, self.model(x, training=True), sample_weight=mask)
        clipped = self._engine.clipped_sum(
            losses,
            variables,
            tf.zeros([2], tf.int64),  # No microbatches are drawn.
            most_rows=self._sampling.padded_batch_size,
        )
        return [
            tf.zeros(v.shape, _wide(v.dtype)) if g is None else tf.cast(g, _wide(v.dtype))
            for g, v in zip(clipped.gradients, variables, strict=True)
        ]

    @tf.function
    def _choose_and_step(self, sums: list[tf.Tensor], position: tf.Tensor) -> tf.Tensor:
        variables = self.model.trainable_variables
        origin = [tf.cast(tf.identity(v), _wide(v.dtype)) for v in variables]
        # By the expected batch size, a public constant, and then by its norm.
        velocity = [
            self.options.momentum * v + s / self._sampling.expected_batch_size
            for v, s in zip(self._velocity, sums, strict=True)
        ]
        length = tf.linalg.global_norm(velocity)
        direction = [tf.math.divide_no_nan(v, length) for v in velocity]
        sizes = self._largest_step * tf.linspace(
            tf.constant(0.0, tf.float64), 1.0, self.options.candidates + 1
        )
        key = self._testing.next_key(position)
        batch = self._source.draw(key, self._selection)

        def go(size: tf.Tensor) -> None:
            for v, start, d in zip(variables, origin, direction, strict=True):
                v.assign(tf.cast(start - tf.cast(size, d.dtype) * d, v.dtype))

        def score(size: tf.Tensor) -> tf.Tensor:
            go(size)
            return self._clipped_loss(*batch)

        scores = tf.map_fn(score, sizes, parallel_iterations=1, fn_output_signature=tf.float64)
        index = self._choose(scores, self._choice.next_key(position))
        go(sizes[index])
        for old, new in zip(self._velocity, velocity, strict=True):
            old.assign(tf.where(index > 0, new, old))
        return sizes[index]

    def _choose(self, scores: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Draws the index of the noisy minimum, by the probabilities that Gumbel noise gives."""
        scale = self.options.loss_clip / self.options.selection_range
        levels = tf.cumsum(tf.nn.softmax(-scores / scale))
        uniform = chacha.uniforms(key, 1)[0]
        index = tf.reduce_sum(tf.cast(levels <= uniform * levels[-1], tf.int32))
        return tf.minimum(index, tf.size(scores) - 1)

    @tf.autograph.experimental.do_not_convert
    def _traced_loss(self, x: Any, y: Any, mask: tf.Tensor) -> tf.Tensor:
        """Sums the clipped losses of a batch in float64: an example adds a value in [0, clip]."""
        losses = self._loss(y, self.model(x, training=False), sample_weight=mask)
        self._engine.draw_secretly(losses)  # Some layers draw without `training`, too.
        losses = tf.cast(per_example_losses(losses), tf.float64)
        clip = tf.constant(self.options.loss_clip, tf.float64)
        clipped = tf.where(tf.math.is_finite(losses), tf.clip_by_value(losses, 0.0, clip), clip)
        return tf.reduce_sum(tf.where(mask, clipped, 0.0))

    # The state.

    def _parameters(self) -> dict[str, float]:
        return {
            **{name: getattr(self.options, name) for name in _PRIVACY_PARAMETERS},
            "dataset_size": self._sampling.dataset_size,
            "expected_batch_size": self._sampling.expected_batch_size,
        }

    def _save(self) -> None:
        """Writes what has been spent where checkpoints find it."""
        state = {"parameters": self._parameters(), "budget": self.budget.to_dict()}
        self._saved.assign(json.dumps(state))

    def _resume(self) -> None:
        """Reads what had been spent when the checkpoint was saved that was restored last."""
        state = json.loads(self._saved.numpy())
        for name, value in self._parameters().items():
            if state["parameters"][name] != value:
                raise PrivacyParametersChangedError(
                    f"Argument `{name}` must stay {state['parameters'][name]!r}, with which "
                    f"training began. Received: {name}={value!r}. Start a new training to "
                    "change it."
                )
        self.budget.resume(state["budget"])


def average(
    first: Sequence[tf.Tensor],
    second: Sequence[tf.Tensor],
    first_precision: float,
    second_precision: float,
) -> list[tf.Tensor]:
    """Returns the average of two measurements by their precisions: its precision is their sum."""
    share = second_precision / (first_precision + second_precision)
    return [(1 - share) * a + share * b for a, b in zip(first, second, strict=True)]


def _check_batches(batches: PoissonBatches) -> None:
    """Raises a ValueError for batches that cannot be drawn from whole examples in memory."""
    source = batches.source
    present = {
        "chunk_size": batches.sampling.gradient_accumulation_steps != 1,
        "transform": source.transform is not None,
        "sample_weight": len(parts_of(source.element_spec)) == 3,
        "cycle_length": source.cycle is not None,
        "data that are not in memory": source.stored is not None,
    }
    if not has_labels(source.element_spec):
        raise error("batches", "of examples with labels, (x, y)", batches)
    for name, there in present.items():
        if there:
            raise error("batches", f"without {name}", batches)


def _variable(value: Any, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(value, dtype=dtype, trainable=False)


def _wide(dtype: tf.DType) -> tf.DType:
    """Returns the type that updates of weights are computed in: float32 at least."""
    dtype = tf.as_dtype(dtype).base_dtype  # A variable of Keras 3 has its name.
    return tf.float32 if dtype.size < 4 else dtype


def _open_spec(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
