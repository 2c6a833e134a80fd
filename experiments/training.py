"""Trains a classifier as its settings say, from wherever an earlier attempt was interrupted."""

import dataclasses
import importlib.metadata
import json
import math
import platform
import textwrap
import time
from typing import Any

import tensorflow as tf
import tqdm

import tfdp
from experiments.datasets import Data
from experiments.report import Row, RunFolder
from experiments.schedules import make_schedule
from experiments.settings import SELECTIVE_FLAGS, RefusedError, Settings, make_network
from tfdp.accounting import PoissonSampling
from tfdp.base import devices
from tfdp.data.source import in_variables
from tfdp.evaluation import subgroup_report

PRIVATE_OPTIMIZERS = {
    "dpsgd": "DPSGD",
    "dpis": "DPSGD",
    "dpis_adam": "DPAdam",
    "dpadam": "DPAdam",
    "dpadambc": "DPAdamBC",
    "dpsignsgd": "DPSignSGD",
    "dpsignadam": "DPSignAdam",
    "dpsur_sgd": "DPSURSGD",
    "dpsur_adam": "DPSURAdam",
    "dpsur_signsgd": "DPSURSignSGD",
    "dpsur_signadam": "DPSURSignAdam",
}
_EVALUATION_BATCH = 1000
_SHIFT = 2  # Pixels, at most, of --augmentations.
# How long attempts took says how many of them were rejected.
_WITHOUT_TIMES = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} epochs{postfix}"
_LEAST_ACCEPTANCE = 1e-4
_PACKAGES = ("dp-accounting", "numpy")


class Training:
    """One run: a model, its batches, and a folder in which it can be found again.

    Everything that leaves it is covered by the ledger, or is no function of the training data:
    Keras's metrics on the training batches are neither shown nor kept.

    Args:
      settings: Settings of the run.
      data: The training and evaluation data.
      folder: Folder of the run.
      progress: Whether a bar shows the epochs.
      every_epoch: Whether the model is evaluated after every epoch, not after the last only.

    Raises:
      RefusedError: The settings do not fit the data, or the run in `folder` is of other ones.
    """

    def __init__(
        self,
        settings: Settings,
        data: Data,
        folder: RunFolder,
        *,
        progress: bool = True,
        every_epoch: bool = True,
    ):
        settings.check_size(data.size)
        self.settings = settings
        self._keras = settings.front_end
        self.data = data
        self.folder = folder
        self.progress = progress
        self.every_epoch = every_epoch
        self.rows: list[Row] = []
        self.steps_per_epoch = settings.steps_per_epoch(data.size)
        self.noise_multiplier = self._calibrate() if settings.private else None
        folder.begin(settings)
        if settings.seed is not None:
            self._keras.keras.utils.set_random_seed(settings.seed)
        if settings.insecure_fixed_noise:
            tf.config.experimental.enable_op_determinism()
        self.model = make_network(settings)
        self._restore()

    def run(self) -> dict[str, Any]:
        """Trains what is left to train, and writes the artefacts.

        Returns:
          What `result.json` holds.
        """
        done = len(self.rows)
        if done < self.settings.epochs:
            with tqdm.tqdm(
                total=self.settings.epochs,
                initial=done,
                unit="epoch",
                bar_format=_WITHOUT_TIMES if self.settings.selective else None,
                desc=f"{self.settings.dataset} {self.settings.method}",
                disable=not self.progress,
            ) as bar:
                self._train(bar)
        return self._finish()

    def _train(self, bar: tqdm.tqdm) -> None:
        self.model.fit(
            self.batches,
            epochs=self.settings.epochs,
            initial_epoch=len(self.rows),
            verbose=0,
            callbacks=[*self._budget(), _EpochEnd(self, bar).callback(self._keras.keras)],
        )

    def end_epoch(self, epsilon: float, seconds: float | None) -> Row:
        """Evaluates the model if wanted, makes what is known durable, and only then public."""
        accuracy, loss = self._evaluate() if self.every_epoch else (None, None)
        epoch = len(self.rows) + 1
        row = Row(epoch, self._step(), epsilon, accuracy, loss, seconds)
        self.rows.append(row)
        self._saved_rows.assign(json.dumps([dataclasses.asdict(row) for row in self.rows]))
        self._checkpoints.save(checkpoint_number=epoch)
        self.folder.write_rows(self.rows)
        return row

    def _evaluate(self) -> tuple[float, float]:
        """Accuracy and mean loss on the evaluation split."""
        loss, accuracy = self.model.evaluate(
            self.data.eval_x, self.data.eval_y, batch_size=_EVALUATION_BATCH, verbose=0
        )
        return accuracy, loss

    def _step(self) -> int:
        """Logical steps after the epoch that has just ended."""
        return (len(self.rows) + 1) * self.steps_per_epoch

    def _calibrate(self) -> float:
        budget = {
            "target_epsilon": self.settings.target_epsilon,
            "delta": self.settings.delta,
            "dataset_size": self.data.size,
            "expected_batch_size": self.settings.expected_batch_size,
        }
        steps = self.settings.epochs * self.steps_per_epoch
        try:
            if not self.settings.selective:
                sampling = PoissonSampling(self.data.size, self.settings.expected_batch_size)
                probe = self._private_optimizer(sampling, noise_multiplier=1.0)
                return tfdp.calibrate_noise_multiplier(
                    **budget, steps=steps, releases_signs=probe.releases_signs
                )
            return tfdp.accounting.calibrate_selective_release(
                **budget,
                updates=steps,
                validation_batch_size=self.settings.validation_batch_size,
                validation_noise_multiplier=self.settings.validation_noise_multiplier,
                threshold=self.settings.threshold,
                max_attempts=self._max_attempts(),
                selective_release=self.settings.selective_release,
            )
        except ValueError as error:
            raise RefusedError(
                f"--target_epsilon={self.settings.target_epsilon:g} at --delta="
                f"{self.settings.delta:g} cannot be reached. {error}"
            ) from error

    def _max_attempts(self) -> int | None:
        least, _ = tfdp.accounting.acceptance_bounds(
            self.settings.validation_noise_multiplier, self.settings.threshold
        )
        if self.settings.max_attempts is None and least < _LEAST_ACCEPTANCE:
            raise RefusedError(
                "--threshold and --validation_noise_multiplier must leave a fair chance that a "
                "useless update is accepted, or --max_attempts must be given. Received: "
                f"--threshold={self.settings.threshold:g}, --validation_noise_multiplier="
                f"{self.settings.validation_noise_multiplier:g}: a probability of {least:.2g}."
            )
        return self.settings.max_attempts

    def _restore(self) -> None:
        """Goes back to the end of the last epoch that was saved, or to the beginning."""
        self._saved_rows = tf.Variable("[]", trainable=False)
        latest = tf.train.latest_checkpoint(str(self.folder.checkpoint))
        if latest:
            saved = tf.train.load_checkpoint(latest).get_tensor("rows/.ATTRIBUTES/VARIABLE_VALUE")
            self.rows = [Row(**row) for row in json.loads(saved)]
        self._compile()
        checkpoint = tf.train.Checkpoint(
            model=self.model, rows=self._saved_rows, **self._training_state()
        )
        self._checkpoints = tf.train.CheckpointManager(
            checkpoint, str(self.folder.checkpoint), max_to_keep=1
        )
        if latest:
            checkpoint.restore(latest).assert_consumed()
            self.folder.write_rows(self.rows)

    def _training_state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds besides the model."""
        # Keras makes an optimizer's state at its first step: too late to restore a run that has
        # none left.
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        build = optimizer.build if self.settings.keras == 3 else optimizer._create_all_weights
        build(variables)
        return {"optimizer": optimizer}

    def _compile(self) -> None:
        keras = self._keras.keras
        loss = keras.losses.SparseCategoricalCrossentropy
        if self.settings.private:
            self.batches = self._poisson_batches()
            metrics = "weighted_metrics" if self.batches.sampling.has_padding else "metrics"
            self.model.compile(
                optimizer=self._private_optimizer(self.batches.sampling, self.noise_multiplier),
                loss=loss(from_logits=True, reduction="none"),
                jit_compile=False,
                **{metrics: ["accuracy"]},
            )
            return
        self.batches = self._shuffled_batches()
        rate, momentum = self._learning_rate(), self.settings.momentum
        optimizers = keras.optimizers if self.settings.keras == 3 else keras.optimizers.legacy
        if self.settings.method == "sgd":
            optimizer = optimizers.SGD(rate, momentum=momentum)
        else:
            optimizer = optimizers.Adam(rate, beta_1=momentum)
        self.model.compile(
            optimizer, loss=loss(from_logits=True), metrics=["accuracy"], jit_compile=False
        )

    def _learning_rate(self) -> Any:
        return make_schedule(
            self.settings.learning_rate_schedule,
            self.settings.learning_rate,
            self.settings.epochs * self.steps_per_epoch,
            self._keras.keras,
        )

    def _private_optimizer(self, sampling: PoissonSampling, noise_multiplier: float) -> Any:
        method = self.settings.method
        momentum = "beta_1" if "adam" in method else "momentum"
        names = SELECTIVE_FLAGS if self.settings.selective else ()
        selection = {name: getattr(self.settings, name) for name in names}
        if method.startswith("dpis"):
            selection["clipping_rule"] = tfdp.contrib.ImportanceSamplingClipping()
        return getattr(self._keras.private, PRIVATE_OPTIMIZERS[method])(
            l2_norm_clip=self.settings.l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=self.settings.num_microbatches,
            learning_rate=self._learning_rate(),
            # Apart from the seed of the sampling, which must not tell anything about the noise.
            noise_seed=self.settings.seed + 1 if self.settings.insecure_fixed_noise else None,
            weight_decay=self.settings.weight_decay,
            **{momentum: self.settings.momentum},
            **selection,
            sampling=sampling,
        )

    def _poisson_batches(self) -> tf.data.Dataset:
        padding = "none"
        if devices.has_gpu() and not self.settings.selective:  # Kernels are chosen for each size.
            padding = "buckets" if self.settings.chunk_size is None else "full"
        return tfdp.data.poisson_batches(
            (self.data.train_x, self.data.train_y),
            expected_batch_size=self.settings.expected_batch_size,
            chunk_size=self.settings.chunk_size,
            padding=padding,
            augmentations=self.settings.augmentations or 1,
            transform=_shifted if self.settings.augmentations else None,
            steps_per_epoch=self.steps_per_epoch,
            seed=self.settings.seed,
            first_step=len(self.rows) * self.steps_per_epoch,
        )

    def _shuffled_batches(self) -> tf.data.Dataset:
        """Every example once per epoch, in an order that the seed and the epoch decide."""
        size, batch = self.data.size, self.settings.expected_batch_size
        x, y = in_variables((tf.constant(self.data.train_x), tf.constant(self.data.train_y)))
        seed = self.settings.seed if self.settings.seed is not None else time.time_ns()
        epoch = tf.Variable(len(self.rows), dtype=tf.int64, trainable=False)

        def shuffle(_: tf.Tensor) -> tf.data.Dataset:
            key = tf.stack([tf.constant(seed, tf.int64), epoch.assign_add(1)])
            order = tf.random.experimental.stateless_shuffle(tf.range(size), key)
            return tf.data.Dataset.from_tensor_slices(order).batch(batch)

        batches = tf.data.Dataset.range(1).flat_map(shuffle)
        batches = batches.map(lambda rows: (tf.gather(x, rows), tf.gather(y, rows)))
        self.steps_per_epoch = -(-size // batch)
        return batches.apply(tf.data.experimental.assert_cardinality(self.steps_per_epoch))

    def _budget(self) -> list[Any]:
        if not self.settings.private:
            return []
        # The noise is calibrated to the steps that are planned; this stops whatever goes beyond.
        return [self._keras.budget(self.settings.target_epsilon, self.settings.delta)]

    def _finish(self) -> dict[str, Any]:
        """Writes what a finished run leaves, `result.json` last."""
        if self.rows[-1].accuracy is None:
            accuracy, loss = self._evaluate()
            self.rows[-1] = dataclasses.replace(self.rows[-1], accuracy=accuracy, loss=loss)
            self.folder.write_rows(self.rows)
        self.folder.write_model(self.model)
        self.folder.write_curve(self.rows, self.settings)
        self.folder.write_privacy(self._privacy_text())
        result = self._result()
        self.folder.write_result(result)
        self.folder.clear_checkpoint()
        return result

    def _result(self) -> dict[str, Any]:
        last = self.rows[-1]
        result = {
            "settings": dataclasses.asdict(self.settings),
            "accuracy": last.accuracy,
            # JSON has no NaN, and a run that diverged is a result, too.
            "loss": last.loss if math.isfinite(last.loss or 0.0) else None,
            "accuracy_by_class": self._accuracy_by_class(),
            "evaluated_on": self.settings.eval_split,
            "evaluation_examples": len(self.data.eval_y),
            "dataset_size": self.data.size,
            "parameters": self.model.count_params(),
            "steps": last.step,
            "seconds": last.seconds,
            "epsilon": None,
        }
        if self.settings.private:
            bound, released = self._released()
            result |= {
                "epsilon": bound.epsilon,
                "delta": bound.delta,
                "epsilon_by_accountant": dict(bound.by_accountant),
                "noise_multiplier": self.noise_multiplier,
                "ledger": released,
            }
        packages = (*self._keras.packages, *_PACKAGES)
        versions = {name: importlib.metadata.version(name) for name in packages}
        result["versions"] = {
            "python": platform.python_version(),
            "tfdp": tfdp.__version__,
            **versions,
        }
        return result

    def _released(self) -> tuple[tfdp.accounting.EpsilonBound, dict[str, Any]]:
        """Returns the guarantee, and what it is of."""
        ledger = self.model.optimizer.ledger
        return ledger.epsilon(self.settings.delta), ledger.to_dict()

    def _privacy_text(self) -> str:
        return privacy_text(self.settings, self.model, self.data.size)

    def _accuracy_by_class(self) -> dict[str, float]:
        """Accuracy of the last model on the evaluation examples of each class."""
        labels = self.data.eval_y
        report = subgroup_report(
            self.model, self.data.eval_x, labels, labels, batch_size=_EVALUATION_BATCH
        )
        return {group.name: group.value for group in report.subgroups}


def _shifted(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Shifts an image at random; zeros come in."""
    border = tf.constant([[_SHIFT, _SHIFT], [_SHIFT, _SHIFT], [0, 0]])
    return tf.image.random_crop(tf.pad(image, border), tf.shape(image)), label


class _EpochEnd:
    """Shows and saves, after every epoch, accuracy on the evaluation split and epsilon."""

    def __init__(self, training: Training, bar: tqdm.tqdm):
        self._training = training
        self._bar = bar
        self._began = 0.0

    def callback(self, keras: Any) -> Any:
        """Returns a callback that does this."""
        return keras.callbacks.LambdaCallback(
            on_train_begin=self._on_train_begin, on_epoch_end=self._on_epoch_end
        )

    def _on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        rows = self._training.rows
        self._began = time.monotonic() - ((rows[-1].seconds if rows else None) or 0.0)

    def _on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        epsilon = (logs or {}).get("epsilon", math.inf)  # by PrivacyBudget
        # How long attempts took says how many of them were rejected.
        hidden = self._training.settings.selective
        row = self._training.end_epoch(epsilon, None if hidden else time.monotonic() - self._began)
        shown = {}
        if row.accuracy is not None:
            shown["accuracy"] = f"{row.accuracy:.3f}"
        if math.isfinite(epsilon):
            shown["epsilon"] = f"{epsilon:.3f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()


def privacy_text(settings: Settings, model: Any, dataset_size: int) -> str:
    """States what can be said about the privacy of a trained model.

    Args:
      settings: Settings of the run.
      model: The trained model.
      dataset_size: Number of training examples.

    Returns:
      The statement of `tfdp.privacy_statement`, and what only this experiment knows.
    """
    if not settings.private:
        return f"No differential privacy: --method={settings.method} trains without noise."
    text = tfdp.privacy_statement(model, settings.delta, dataset_size=dataset_size)
    return "\n".join([text, "This run:", *remarks(settings)])


def remarks(settings: Settings) -> list[str]:
    """Lists what holds of every private run of this experiment."""
    found = [
        f"The examples of the {settings.eval_split} split, on which accuracy was measured, are not "
        "among those that are protected."
    ]
    if settings.seed is not None:
        found.append(
            "Who was sampled was decided by --seed, which flags.txt and result.json hold, and "
            "which can be guessed. Epsilon does not hold towards those who know it: leave --seed "
            "out when the data is really private, and the operating system's entropy decides."
        )
    return [
        textwrap.fill(remark, 88, initial_indent="- ", subsequent_indent="  ") for remark in found
    ]
