"""Trains a classifier by DPAGD: `experiments.classify --method=dpagd`."""

import dataclasses
import textwrap
import time
from typing import Any

import tensorflow as tf
import tqdm

import tfdp
from experiments.settings import RefusedError
from experiments.training import Training, remarks


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Settings of the choice of a step size, and gamma: what a choice of no step adds to costs."""

    candidates: int
    batch_size: int
    share: float
    budget_growth: float


# Found on held-out examples, a few runs each (without momentum on MNIST at epsilon 1, with momentum
# on Fashion-MNIST at epsilon 4); the same for all epsilons. With momentum, a choice that is more
# exact takes shorter steps, or none, more often, and ends lower. Without it four candidates are too
# few: the shortest raises the loss, so that training stands still. The paper's gamma of 0.1 is for
# few iterations: in hundreds, "no step" wins by chance, and the cost grows each time. With momentum
# and 0.01, a third of the iterations were lost to it. The network for words needs long steps, each
# of which raises the loss, however exact the gradient: a choice that sees this takes none. With
# 0.002 of the budget, runs at epsilon 3 and 4 did not end.
_WITHOUT_MOMENTUM = _Choice(candidates=20, batch_size=512, share=0.15, budget_growth=0.01)
_WITH_MOMENTUM = _Choice(candidates=4, batch_size=256, share=0.05, budget_growth=0.001)
_ON_WORDS = _Choice(candidates=4, batch_size=256, share=0.0002, budget_growth=0.001)
_LOSS_CLIP = 3.0


class DescentTraining(Training):
    """A run of DPAGD. `--learning_rate`, with its schedule, is the length of the longest step.

    The budget lasts for as many iterations as its epochs have if each makes a step at once. It is
    fewer when measurements have to be repeated: the run then ends early.
    """

    def _calibrate(self) -> float:
        batch = self.settings.expected_batch_size
        self._choice = _WITH_MOMENTUM if self.settings.momentum else _WITHOUT_MOMENTUM
        if self.settings.dataset == "imdb_reviews":
            self._choice = _ON_WORDS
        self._selection_batch_size = min(self._choice.batch_size, batch)
        try:
            self._budget_filter, noise, self._selection_range = tfdp.contrib.calibrate_descent(
                target_epsilon=self.settings.target_epsilon,
                delta=self.settings.delta,
                dataset_size=self.data.size,
                expected_batch_size=batch,
                selection_batch_size=self._selection_batch_size,
                iterations=self.settings.epochs * self.steps_per_epoch,
                selection_share=self._choice.share,
            )
        except ValueError as error:
            raise RefusedError(
                f"--target_epsilon={self.settings.target_epsilon:g} at --delta="
                f"{self.settings.delta:g} cannot be reached. {error}"
            ) from error
        return noise

    def _compile(self) -> None:
        settings = self.settings
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        self.model.compile(loss=loss, weighted_metrics=["accuracy"])  # for `evaluate`
        self.batches = tfdp.data.poisson_batches(
            (self.data.train_x, self.data.train_y),
            expected_batch_size=settings.expected_batch_size,
            seed=settings.seed,
        )
        self.descent = tfdp.contrib.AdaptiveGradientDescent(
            self.model,
            loss,
            self.batches,
            self._budget_filter,
            tfdp.contrib.DescentOptions(
                l2_norm_clip=settings.l2_norm_clip,
                noise_multiplier=self.noise_multiplier,
                loss_clip=_LOSS_CLIP,
                selection_range=self._selection_range,
                selection_batch_size=self._selection_batch_size,
                max_step_size=self._learning_rate(),
                candidates=self._choice.candidates,
                budget_growth=self._choice.budget_growth,
                momentum=settings.momentum,
            ),
            noise_seed=settings.seed + 1 if settings.insecure_fixed_noise else None,
        )

    def _training_state(self) -> dict[str, Any]:
        return {"descent": self.descent}

    def _train(self, bar: tqdm.tqdm) -> None:
        began = time.monotonic() - ((self.rows[-1].seconds if self.rows else None) or 0.0)
        # After a kill between the last iteration and its row, the row is still to be written.
        while not self.descent.finished or not self.rows:
            self.descent.run(self.steps_per_epoch)
            epsilon = self.descent.budget.spent_epsilon()
            row = self.end_epoch(epsilon, time.monotonic() - began)
            if row.accuracy is not None:
                bar.set_postfix({"accuracy": f"{row.accuracy:.3f}"}, refresh=False)
            bar.update()

    def _step(self) -> int:
        return self.descent.iterations

    def _released(self) -> tuple[tfdp.accounting.EpsilonBound, dict[str, Any]]:
        return self.descent.budget.guarantee, self.descent.budget.to_dict()

    def _privacy_text(self) -> str:
        settings = self.settings
        text = (
            f"({settings.target_epsilon:g}, {settings.delta:g})-differential privacy, add or "
            f"remove one of {self.data.size} training examples, for the model and all that was "
            "shown on the way, but for times. Noise, step sizes and the end of training were "
            "chosen by what had been released: a Renyi filter of order "
            f"{self.descent.budget.order:g} kept all of it "
            "within the budget, which is the guarantee, whether or not it was spent to the end. "
            "Batches were Poisson samples."
        )
        return "\n".join([textwrap.fill(text, 88), "This run:", *remarks(settings)])
