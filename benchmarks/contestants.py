"""Who takes part in the benchmarks, and what is known about them before they start."""

import dataclasses

from benchmarks.problems import Problem

# How much memory one contestant may be expected to need, as a part of what is available.
MEMORY_FRACTION = 0.7


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to make a training step.

    Attributes:
      name: Name on the command line.
      title: Name in the tables.
      framework: "keras", "torch" or "jax".
      plain: Name of the step without privacy of the same framework and optimizer; its own name
        for such a step.
      slow: Whether a step takes so long that a few are enough, and taken after the others'.
      memory: Quantity that its memory grows with: "parameters" where all per-example gradients lie
        in memory together, "activations" where each example's backward pass is one over the
        whole batch, "" otherwise.
    """

    name: str
    title: str
    framework: str
    plain: str
    slow: bool = False
    memory: str = ""

    @property
    def private(self) -> bool:
        """Whether it clips and adds noise."""
        return self.plain != self.name

    def expected_bytes(self, problem: Problem, batch: int) -> int:
        """Rough memory of a step beyond the ordinary; enough to tell what cannot be run."""
        gradients = 2 * 4 * batch * problem.parameters
        if self.memory == "activations":
            return gradients + 8 * 4 * batch**2 * problem.largest_activation
        return gradients if self.memory == "parameters" else 0


_ALL = (
    Contestant("keras_sgd", "plain Keras SGD", "keras", "keras_sgd"),
    Contestant("tfdp_one_pass", "tfdp.DPSGD, one-pass", "keras", "keras_sgd"),
    Contestant("tfdp_secure", "tfdp.DPSGD, secure noise", "keras", "keras_sgd"),
    Contestant("tfdp_philox", "tfdp.DPSGD, Philox noise", "keras", "keras_sgd"),
    Contestant("tfdp_vectorized", "tfdp.DPSGD, vectorized", "keras", "keras_sgd"),
    Contestant("keras_adam", "plain Keras Adam", "keras", "keras_adam"),
    Contestant("tfdp_adam", "tfdp.DPAdam, one-pass", "keras", "keras_adam"),
    Contestant("tfdp_sign_sgd", "tfdp.DPSignSGD, one-pass", "keras", "keras_sgd"),
    Contestant("tfdp_sign_adam", "tfdp.DPSignAdam, one-pass", "keras", "keras_adam"),
    Contestant("tfdp_dpsur", "tfdp.DPSURSGD, an attempt", "keras", "keras_sgd"),
    Contestant("torch_sgd", "plain PyTorch SGD", "torch", "torch_sgd"),
    Contestant("opacus_hooks", "Opacus, hooks", "torch", "torch_sgd", memory="parameters"),
    Contestant("opacus_ghost", "Opacus, ghost clipping", "torch", "torch_sgd"),
    Contestant("jax_sgd", "plain JAX SGD", "jax", "jax_sgd"),
    Contestant("jax_privacy", "JAX-Privacy", "jax", "jax_sgd", memory="parameters"),
    Contestant("jax_privacy_16", "JAX-Privacy, microbatches of 16", "jax", "jax_sgd"),
    Contestant(
        "tf_privacy",
        "TF-Privacy DPKerasSGD",
        "keras",
        "keras_sgd",
        slow=True,
        memory="activations",
    ),
    Contestant(
        "tf_privacy_vectorized",
        "TF-Privacy VectorizedDPKerasSGD",
        "keras",
        "keras_sgd",
        slow=True,
        memory="activations",
    ),
)
CONTESTANTS = {contestant.name: contestant for contestant in _ALL}

_EXTRA = (
    "tfdp_philox",
    "keras_adam",
    "tfdp_adam",
    "tfdp_sign_sgd",
    "tfdp_sign_adam",
    "tfdp_dpsur",
)
DEFAULT = tuple(name for name in CONTESTANTS if name not in _EXTRA)
