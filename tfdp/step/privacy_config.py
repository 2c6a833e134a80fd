"""The privacy arguments of an optimizer, as one value: checked once, and serialized once."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdp import schedules
from tfdp.accounting.sampling import PoissonSampling
from tfdp.base.validation import error
from tfdp.clipping import clipping_rules
from tfdp.clipping.clipping_rules import AdaptiveQuantileClipping, ClippingRule
from tfdp.schedules import NoiseMultiplier, Stages
from tfdp.step import arguments as checks
from tfdp.step import options
from tfdp.step.adaptive_clip import AdaptiveClip

if TYPE_CHECKING:
    from tfdp.correlated_noise import CorrelatedNoise
    from tfdp.step.compression import Compression
    from tfdp.step.sparse_embeddings import RowSelection, SparseEmbeddings


@dataclasses.dataclass(frozen=True)
class PrivacyConfig:
    """Privacy arguments of an optimizer (`arguments.PRIVATE_ARGUMENTS`), in their final form.

    `checked` makes it of what users give. Front ends pass it on as a whole.
    """

    l2_norm_clip: float
    noise_multiplier: NoiseMultiplier
    expected_batch_size: int
    num_microbatches: int | None
    gradient_accumulation_steps: int
    sampling: PoissonSampling | None
    noise_seed: int | None
    secure_noise: bool
    engine: str
    clipping_rule: ClippingRule
    noise_correlation: "CorrelatedNoise | None"
    compression: "Compression | None"
    sparse_embeddings: "SparseEmbeddings | None"

    @classmethod
    def checked(cls, optimizer: str, arguments: Mapping[str, Any]) -> "PrivacyConfig":
        """Returns the config of arguments as users or saved configs give them.

        Args:
          optimizer: Public name of the optimizer, for messages.
          arguments: The arguments by their names, each of them. Other names are left alone, so
            that `locals()` of a constructor will do.

        Raises:
          ValueError: An argument is out of its range, or does not go with the others.
        """
        given = taken(arguments)
        clip, noise = checks.required(optimizer, given["l2_norm_clip"], given["noise_multiplier"])
        noise = schedules.get(noise)
        size, accumulated, sampling = checks.sampling_of(
            given["sampling"], given["expected_batch_size"], given["gradient_accumulation_steps"]
        )
        config = cls(
            **{
                **given,
                "l2_norm_clip": clip,
                "noise_multiplier": noise,
                "expected_batch_size": size,
                "gradient_accumulation_steps": accumulated,
                "sampling": sampling,
            }
        )
        checks.check_privacy_arguments(
            clip, config.most_noise, size, config.num_microbatches, accumulated, config.noise_seed
        )
        if config.most_noise > 0:
            checks.check_arithmetic()
        config = dataclasses.replace(
            config,
            clipping_rule=clipping_rules.get(given["clipping_rule"]),
            sparse_embeddings=options.get("sparse_embeddings", given["sparse_embeddings"]),
        )
        checks.check_clipping_arguments(
            config.engine, config.clipping_rule, clip, config.num_microbatches
        )
        adaptive = config.adaptive_clip()
        noises = (config.most_noise, 0.0)
        if adaptive is not None:
            noises = (max(adaptive.sum_noises), max(adaptive.count_noises))
        checks.check_secure_noise(config.secure_noise, *noises, sampling)
        correlation = options.get("noise_correlation", given["noise_correlation"])
        checks.check_correlation(
            correlation, noise, sampling, config.secure_noise, adaptive is not None
        )
        compression = options.get("compression", given["compression"])
        if compression is not None:
            checks.check_compression(compression, correlation)
        if config.num_microbatches is not None and config.rows_per_example > 1:
            raise error(
                "num_microbatches",
                "None where examples have several rows",
                config.num_microbatches,
            )
        config = dataclasses.replace(config, noise_correlation=correlation, compression=compression)
        if config.sparse_embeddings is not None:
            options.module("sparse_embeddings").check_arguments(config)
        return config

    @property
    def stages(self) -> Stages:
        """The noise multipliers of the run, and which steps have which."""
        return schedules.stages_of(self.noise_multiplier)

    @property
    def most_noise(self) -> float:
        """The largest noise multiplier."""
        return max(self.stages.values)

    @property
    def allows_signs(self) -> bool:
        """Whether the signs of noisy sums can be all that leaves a step, and have a price.

        Not where the noise of a step depends on that of others, where numbers are kept for later
        steps (compression), where a count leaves as well (a clip that moves), or without noise.
        """
        others = (self.noise_correlation, self.compression, self.sparse_embeddings)
        alone = all(option is None for option in others)
        return alone and self.adaptive_clip() is None and min(self.stages.values) > 0

    @property
    def rows_per_example(self) -> int:
        """Consecutive rows of a batch that belong to one example."""
        return 1 if self.sampling is None else self.sampling.rows_per_example

    def adaptive_clip(self) -> AdaptiveClip | None:
        """Returns the clip that moves, at its beginning; None if it is constant."""
        if not isinstance(self.clipping_rule, AdaptiveQuantileClipping):
            return None
        noises, size = self.gradient_noises, self.expected_batch_size
        return AdaptiveClip(self.clipping_rule, self.l2_norm_clip, noises, size)

    @property
    def gradient_noises(self) -> list[float]:
        """The noise multiplier of what is released besides counts of rows, in each stage."""
        noises = list(self.stages.values)
        if self.sparse_embeddings is None:
            return noises
        return [self.sparse_embeddings.noise(noise)[1] for noise in noises]

    def row_selection(self) -> "RowSelection | None":
        """Returns the selection of rows by noisy counts; None if all rows are updated."""
        if self.sparse_embeddings is None:
            return None
        selection = options.module("sparse_embeddings").RowSelection
        return selection(self.sparse_embeddings, self.stages.values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values, from which `checked` makes the same config."""
        correlation, sparse, compression = self.noise_correlation, self.sparse_embeddings, None
        if self.compression is not None:
            compression = options.module("compression").serialize(self.compression)
        values = {
            **taken(vars(self)),
            "noise_multiplier": schedules.serialize(self.noise_multiplier),
            "clipping_rule": clipping_rules.serialize(self.clipping_rule),
            "noise_correlation": None if correlation is None else correlation.get_config(),
            "compression": compression,
            "sparse_embeddings": None if sparse is None else sparse.get_config(),
        }
        if self.sampling is None:
            del values["sampling"]
        else:  # It knows the two others.
            values["sampling"] = dataclasses.asdict(self.sampling)
            del values["expected_batch_size"], values["gradient_accumulation_steps"]
        return values


def taken(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the privacy arguments among others, by their names."""
    return {field.name: arguments[field.name] for field in dataclasses.fields(PrivacyConfig)}
