"""Arguments of private optimizers, their ledger and their config."""

import dataclasses
from typing import TYPE_CHECKING, Any

import dp_accounting
import tensorflow as tf

from tfdp.accounting import event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.ledger import PrivacyLedger
from tfdp.accounting.sampling import FULL, NONE, UNITS, PoissonSampling
from tfdp.base.random.key_streams import KeyStream
from tfdp.clipping.engine import ClippingEngine
from tfdp.schedules import NoiseMultiplier
from tfdp.step import options
from tfdp.step.accumulator import Accumulator
from tfdp.step.arguments import ENGINES
from tfdp.step.noise import at_stage
from tfdp.step.privacy_config import PrivacyConfig
from tfdp.step.record import record_ledger, record_table
from tfdp.step.record.cycle_count import CycleCount
from tfdp.step.record.release_count import ReleaseRecord
from tfdp.step.state import PersistentState

if TYPE_CHECKING:
    from tfdp.correlated_noise import CorrelatedNoise
    from tfdp.step.compression import Compression, Compressor
    from tfdp.step.noise_memory import NoiseMemory
    from tfdp.step.record.tuned_rows import RunSelection
    from tfdp.step.sparse_embeddings import SparseEmbeddings


class PrivacyParameters(PersistentState):
    """Arguments of a private optimizer, its ledger and its config."""

    def _set_privacy(self, config: PrivacyConfig) -> None:
        """Takes over the arguments, and makes the parts of the step that they ask for."""
        self._config = config
        self._releases_signs = config.allows_signs and self._moves_by_signs()
        self._stages = config.stages
        self._has_noise = config.most_noise > 0
        self._sampled = config.sampling
        self._expected_batch_size = config.expected_batch_size
        self._dataset_size = None if self._sampled is None else self._sampled.dataset_size
        self._gradient_accumulation_steps = config.gradient_accumulation_steps
        self._correlation = config.noise_correlation
        self._compression = config.compression
        self._secure_noise = config.secure_noise
        self._clipping = self._made_engine(config)
        self._adaptive = config.adaptive_clip()
        self._gradient_noises = config.gradient_noises
        self._rows = config.row_selection()
        self._memory: NoiseMemory | None = None
        if self._correlation is not None and self._correlation.vectors > 0 and self._has_noise:
            self._memory = options.module("noise_memory").NoiseMemory(self._correlation)
        self._cycles: CycleCount | None = None
        if self._sampled is not None and self._sampled.cycle_length > 1:
            self._cycles = CycleCount(self._sampled.cycle_length, self._sampled.redraws_sets)
        self._compressor: Compressor | None = None
        if self._compression is not None:
            self._compressor = options.module("compression").Compressor(self._compression)
        self._noise = KeyStream(config.noise_seed, "noise")
        self._accumulators: dict[int, Accumulator] = {}  # One for each replica.
        self._warnings: set[str] = set()  # Issued so far.
        self._state_to_load: dict[str, Any] = {}
        self._released = ReleaseRecord(
            self._kind(), self._privacy_parameters(), config.noise_seed is not None, self._stages
        )

    def _made_engine(self, config: PrivacyConfig) -> ClippingEngine:
        engine = ENGINES[config.engine](
            config.l2_norm_clip, config.num_microbatches, config.clipping_rule
        )
        engine.wide_sums = config.secure_noise and self._has_noise
        engine.rows_per_example = config.rows_per_example
        if config.sparse_embeddings is not None:
            engine.table_rows = config.sparse_embeddings.table_rows
        if config.sampling is not None:
            usual = -(-config.sampling.usual_batch_size // config.gradient_accumulation_steps)
            engine.usual_rows = usual * config.rows_per_example
        if config.sampling is not None and config.sampling.padding != FULL:
            engine.streams = KeyStream(config.noise_seed, "layers")
        return engine

    def count_as_run_of(self, selection: "RunSelection") -> None:
        """Counts all steps as those of one run of a private selection, whose cost they then have.

        Signs count as the noisy sums: all runs of a selection must have one price.

        Raises:
          RuntimeError: The optimizer is built already.
          ValueError: Steps are no Gaussian mechanisms on Poisson batches of their own, or in epochs
            by random allocation, all alike.
        """
        if self._released.created:
            raise RuntimeError("The optimizer is built already: its steps count for themselves.")
        as_sums = {
            record_table.SIGNS: record_table.GAUSSIAN,
            record_table.SIGNS_UNPADDED: record_table.GAUSSIAN_UNPADDED,
        }
        kind = as_sums.get(int(self._kind()), int(self._kind()))
        in_epochs = kind in (record_table.ALLOCATED, record_table.ALLOCATED_UNPADDED)
        independent = kind in as_sums.values() and self._cycles is None
        if not ((independent or in_epochs) and len(self._stages.values) == 1):
            raise ValueError(
                "Each run of a private selection must take Gaussian steps of one noise multiplier, "
                "on Poisson batches without cycles or in epochs of new sets, and release nothing "
                f"else. Received: {self._public_name()} with {self._config}."
            )
        # With what says how padded batches are cut off.
        parameters = {**self._privacy_parameters(), **selection.parameters(kind + self._kind() % 1)}
        fixed_seed = self._config.noise_seed is not None
        self._released = ReleaseRecord(record_table.TUNED, parameters, fixed_seed)

    # What the optimizer is.

    def _moves_by_signs(self) -> bool:
        """Returns whether an update uses the signs of the noisy mean gradient, and no magnitude.

        It is asked before the base class has its arguments.
        """
        return False

    @property
    def releases_signs(self) -> bool:
        """True if steps release the signs of the noisy sums alone, which cost less privacy.

        The update then gets +1 or -1 for each coordinate, and the ledger counts
        `tfdp.accounting.SignedGaussianDpEvent`: see docs/sign_accounting.md.
        """
        return self._releases_signs

    def _public_name(self) -> str:
        """Returns the name of the class as users import it, for messages."""
        return f"tfdp.{type(self).__name__}"

    @property
    def l2_norm_clip(self) -> float:
        """Largest l2 norm of an example's (a microbatch's) gradient; if adaptive, at first."""
        return self._clipping.l2_norm_clip

    @property
    def current_l2_norm_clip(self) -> float:
        """The clip of the next step: `l2_norm_clip`, unless it is adaptive."""
        return self.l2_norm_clip if self._adaptive is None else float(self._adaptive.value())

    @property
    def noise_multiplier(self) -> NoiseMultiplier:
        """Standard deviation of the noise, in units of the sensitivity; or its schedule."""
        return self._config.noise_multiplier

    def _next_stage(self) -> int:
        """Returns the stage of the next step, outside of graphs."""
        held = None if self._cycles is None else self._cycles.stage_held()
        return self._stages.of(self.scheduled_steps()) if held is None else held

    def scheduled_steps(self) -> int:
        """Returns the number of the next step in the noise's schedule; 0 without one."""
        return self._released.scheduled_steps() if len(self._stages.values) > 1 else 0

    def _noise_now(self, stage: tf.Tensor | None) -> float | tf.Tensor:
        """Returns the noise multiplier of the gradients in the step being built, of this stage."""
        return at_stage(self._gradient_noises, stage)

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise that the next step adds to the clipped sum.

        (With cyclic sampling and a schedule, if its draw follows that of the step before.)

        (With a `tfdp.clipping.TwoTermLoss` each variable has its own. With `secure_noise` it is
        larger by less than 1%: see docs/noise.md. With `sparse_embeddings`, rows that are left out
        get none.)
        """
        if not self._has_noise:
            return 0.0
        stage = self._next_stage()
        if self._adaptive is not None:
            return self._adaptive.sum_noises[stage] * self.current_l2_norm_clip
        return self._gradient_noises[stage] * self._clipping.sensitivity()

    @property
    def noise_correlation(self) -> "CorrelatedNoise | None":
        """Correlation of the noise from step to step; None if it is independent."""
        return self._correlation

    @property
    def compression(self) -> "Compression | None":
        """Rule that sets coordinates of the gradient to zero; None if all are kept."""
        return self._compression

    @property
    def sparse_embeddings(self) -> "SparseEmbeddings | None":
        """Rule by which rows of tables are left out of a step; None if all rows get noise."""
        return self._config.sparse_embeddings

    def releases_begun(self, steps: int, anew: bool = False) -> int:
        """Returns how many releases the ledger will record for the next steps.

        Args:
          steps: How many steps.
          anew: Whether their batches may come from another object than those before, so that a
            cycle of cyclic sampling begins.
        """
        return steps if self._cycles is None else self._cycles.begun_by(steps, anew)

    @property
    def secure_noise(self) -> bool:
        """True if floating-point numbers reveal no more than the ideal mechanism."""
        return self._secure_noise

    @property
    def expected_batch_size(self) -> int:
        """Expected number of examples in a logical batch."""
        return self._expected_batch_size

    @property
    def sampling(self) -> PoissonSampling | None:
        """Sampling of the batches, if it was given."""
        return self._sampled

    @property
    def dataset_size(self) -> int | None:
        """Number of training examples, if `sampling` was given."""
        return self._dataset_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches that make one logical batch."""
        return self._gradient_accumulation_steps

    def missing_batches(self) -> int:
        """Returns how many batches an incomplete logical batch lacks; 0 if there is none."""
        counts = [accumulator.count() for accumulator in self._accumulators.values()]
        return -max(counts, default=0) % self._gradient_accumulation_steps

    def drop_partial_sum(self) -> None:
        """Drops the sum of an incomplete logical batch, if there is one."""
        for accumulator in self._accumulators.values():
            accumulator.begin_anew()

    @property
    def clipping(self) -> ClippingEngine:
        """The clipping engine."""
        return self._clipping

    @property
    def ledger(self) -> PrivacyLedger:
        """Record of all releases so far that concern the variables of this optimizer.

        As soon as the optimizer is built, the ledger covers all private steps that went into the
        variables that the optimizer trains or that its loss reads: its own steps and those of other
        private optimizers, in this process and before a checkpoint or a file was loaded. The ledger
        is read-only: pass other releases as `prior` to `tfdp.privacy_statement` and
        `tfdp.PrivacyBudget`.

        Raises:
          ValueError: The optimizer was not given `sampling`.
          PrivacyParametersChangedError: A restored checkpoint is of other privacy parameters.
        """
        self._sampling(self._expected_batch_size)  # Raises if it is not known.
        self._check_state()
        return record_ledger.ledger_of_rows(self._released.rows(), self._observability())

    @property
    def release(self) -> Release:
        """The release that the ledger will record for the next step (or cycle of steps).

        Raises:
          ValueError: The optimizer was not given `sampling`.
        """
        return self.next_releases(self.scheduled_steps(), 1)[0]

    def next_releases(self, first: int, count: int) -> list[Release]:
        """Returns the releases that the ledger will record for some of the steps to come.

        Args:
          first: Number of the first of them in the noise's schedule: `scheduled_steps()`.
          count: How many steps; with cyclic sampling, how many cycles of steps.

        Raises:
          ValueError: The optimizer was not given `sampling`.
        """
        self._sampling(self._expected_batch_size)
        kind, parameters = self._kind(), self._privacy_parameters()
        releases = []
        for noise, steps in self._stages.groups(first, count):
            one = record_ledger.release_of(kind, {**parameters, "noise_multiplier": noise})
            releases.append(dataclasses.replace(one, count=steps))
        return releases

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The Gaussian mechanism that the next logical step applies to its batch."""
        noise = self._stages.values[self._next_stage()]
        return event_codec.sampled_gaussian(1.0, noise, self._releases_signs).event

    def _kind(self) -> float:
        """Returns what a step is, as `record_table` says it."""
        sampled = self._sampled
        unpadded, padded = record_table.GAUSSIAN_UNPADDED, record_table.GAUSSIAN
        if sampled is not None and sampled.redraws_sets:
            unpadded, padded = record_table.ALLOCATED_UNPADDED, record_table.ALLOCATED
        elif self._correlation is not None and not self._correlation.counts_sampling:
            unpadded, padded = record_table.CYCLES_UNPADDED, record_table.CYCLES
        elif self._releases_signs:
            unpadded, padded = record_table.SIGNS_UNPADDED, record_table.SIGNS
        if sampled is not None and sampled.padding == NONE:
            return unpadded
        return (
            padded if sampled is None else record_table.cut_off(padded, sampled.truncation_exponent)
        )

    def _observability(self) -> str:
        return record_ledger.observability(self._privacy_parameters())

    def _sampling(self, expected_batch_size: int) -> PoissonSampling:
        if self._dataset_size is None:
            raise ValueError(
                "Argument `sampling` must be given to the optimizer to know how batches are "
                "sampled: `batches = tfdp.data.poisson_batches(...)`, and "
                f"`{self._public_name()}(..., sampling=batches.sampling)`. Received: "
                "sampling=None."
            )
        return PoissonSampling(self._dataset_size, expected_batch_size)

    def _privacy_parameters(self) -> dict[str, float]:
        return {
            "l2_norm_clip": float(self.l2_norm_clip),
            "noise_multiplier": self._stages.values[0],
            "expected_batch_size": float(self._expected_batch_size),
            "num_microbatches": float(self._clipping.num_microbatches or 0),
            "dataset_size": float(self._dataset_size or 0),
            "privacy_unit": float(0 if self._sampled is None else UNITS.index(self._sampled.unit)),
            "noise_schedule": self._stages.fingerprint,
            "cycle_length": float(1 if self._sampled is None else self._sampled.cycle_length),
        }

    def _privacy_config(self) -> dict[str, Any]:
        """Returns the privacy arguments as plain values, without the secret noise key."""
        return self._config.to_dict()
