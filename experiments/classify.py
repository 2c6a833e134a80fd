"""Trains a classifier with differential privacy, and reports accuracy and privacy cost.

    python -m experiments.classify
    python -m experiments.classify --dataset=mnist --data_dir=... --target_epsilon=1
    python -m experiments.classify --flagfile=results/classify/digits_dpsgd_eps3/flags.txt

Writes metrics.csv, curve.png, privacy.txt, result.json, model.keras and flags.txt to --output_dir.
A run that was interrupted, at any time, resumes from its last epoch when it is called again.

Flags that are not given take the defaults of the data set, in experiments/settings.py. Choose
others on held-out training examples (--eval_split=validation), never on the test set; what that
choice costs in privacy is not part of epsilon.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import os
import sys
from collections.abc import Callable

from absl import flags, logging

import tfdp
from experiments import (
    cli,
    datasets,
    networks,
)
from experiments.front_ends import VERSIONS
from experiments.methods import make_training
from experiments.report import RunFolder
from experiments.schedules import SCHEDULES
from experiments.settings import (
    DEFAULTS,
    METHODS,
    OBSERVABILITY,
    SELECTIVE_METHODS,
    RefusedError,
    Settings,
    resolve,
)
from tfdp.accounting.relation import RELATION

_INTERRUPTED = 130  # The exit status of programs that Ctrl-C ends.


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags, and what makes a value of theirs acceptable, in `values`."""
    _define_what(values)
    _define_privacy(values)
    _define_how(values)
    _define_selection(values)
    _define_where(values)


def settings_from(values: flags.FlagValues) -> Settings:
    """Returns the settings that parsed flags ask for.

    Raises:
      RefusedError: Values that do not go together.
    """
    names = Settings.__dataclass_fields__
    return resolve({name: values[name].value for name in names})


def default_output_dir(settings: Settings) -> str:
    """Returns a run's default folder, relative to the working directory."""
    name = f"{settings.dataset}_{settings.method}"
    if settings.head is not None:
        name += f"_{settings.features}_{settings.head}"
    if settings.private:
        name += f"_eps{settings.target_epsilon:g}"
    if settings.keras is not None:
        name += f"_keras{settings.keras}"
    if settings.eval_split != "test":
        name += f"_{settings.eval_split}"
    if settings.seed is not None:
        name += f"_seed{settings.seed}"
    return os.path.join("results", "classify", name)


def run(values: flags.FlagValues) -> dict:
    """Does what the parsed flags ask for, or reports what an earlier call did.

    Returns:
      What `result.json` holds.

    Raises:
      RefusedError, datasets.DataError: It cannot be done; the message says why.
    """
    settings = settings_from(values)
    path = values["output_dir"].value or default_output_dir(settings)
    places = {name: values[name].value for name in ("data_dir", "features_dir")}
    folder = RunFolder(path, {**places, "output_dir": path})
    if values["overwrite"].value:
        folder.clear()
    folder.check(settings)
    if folder.path.exists():
        folder.lock()  # Before it is asked for a result, which another process may write.
    result = folder.result()
    if result is not None:
        print(f"The run in {folder.path} is finished; --overwrite does it again.")
    else:
        data = datasets.load(
            settings.dataset,
            data_dir=values["data_dir"].value,
            download=values["download"].value,
            eval_split=settings.eval_split,
            validation_examples=settings.validation_examples or 0,
            features=settings.features,
            features_dir=values["features_dir"].value or None,
        )
        result = make_training(settings, data, folder).run()
    print(summary(result, folder))
    return result


def summary(result: dict, folder: RunFolder) -> str:
    """Returns the outcome of a run in a few lines."""
    settings = result["settings"]
    seconds = "" if result["seconds"] is None else f", {result['seconds']:.0f} s"
    lines = [
        f"{settings['dataset']}, {settings['method']}: {result['accuracy']:.2%} of "
        f"{result['evaluation_examples']} {result['evaluated_on']} examples are classified "
        "correctly by the last model.",
        by_class(result["accuracy_by_class"]),
    ]
    if result["epsilon"] is None:
        lines.append("No differential privacy.")
    else:
        by = ", ".join(f"{e:.4f} by {a}" for a, e in result["epsilon_by_accountant"].items())
        lines += [
            f"epsilon = {result['epsilon']:.4f} at delta = {result['delta']:g} ({by}), "
            f"target {settings['target_epsilon']:g}; {RELATION} of one example: the number of "
            "examples, the batches, the steps, the noise and the clip are public.",
            f"noise multiplier {result['noise_multiplier']:.4f}, clip {settings['l2_norm_clip']:g}",
        ]
        if settings["selective_release"] == "conditional":
            lines.append(
                "Only accepted updates are released: nobody may see how many attempts were "
                "rejected, or how long they took."
            )
        if settings["insecure_fixed_noise"]:
            lines.append(
                "--insecure_fixed_noise: for tests; who knows --seed can remove the noise."
            )
        elif settings["seed"] is not None:
            lines.append(
                "--seed: epsilon holds only towards those who do not know it (privacy.txt)."
            )
    lines += [
        f"{result['steps']} steps, {settings['expected_batch_size']} of "
        f"{result['dataset_size']} training examples each{seconds}",
        f"curve.png, metrics.csv, privacy.txt, result.json, model.keras: {folder.path}",
    ]
    return "\n".join(lines)


def by_class(accuracies: dict[str, float]) -> str:
    """Returns the classes with the lowest and highest accuracy: noise costs rare ones more."""
    worst, best = (pick(accuracies, key=accuracies.__getitem__) for pick in (min, max))
    gap = 100 * (accuracies[best] - accuracies[worst])
    return (
        f"Of class {worst}, {accuracies[worst]:.2%} are correct (the worst), of class {best}, "
        f"{accuracies[best]:.2%} (the best): a gap of {gap:.2f} points."
    )


def main(argv: list[str]) -> None:
    """Runs what the command line asks for; what cannot be done ends with a sentence."""
    refusals = (RefusedError, datasets.DataError, tfdp.TooManyAttemptsError)
    try:
        with cli.refusing("classify", argv, *refusals):
            run(flags.FLAGS)
    except KeyboardInterrupt:
        print("\nclassify: interrupted; run the same command again to resume.", file=sys.stderr)
        sys.exit(_INTERRUPTED)


def _default(name: str) -> str:
    """Returns the default of a flag for each data set, for `--help`."""
    by_value: dict[str, list[str]] = {}
    for dataset, defaults in DEFAULTS.items():
        value = getattr(defaults, name)
        if isinstance(value, dict):
            value = ", ".join(f"{rate:g} {method}" for method, rate in value.items())
        text = f"{value:g}" if isinstance(value, float) else str(value)
        by_value.setdefault(text, []).append(dataset)
    if len(by_value) == 1:
        return f"Default: {next(iter(by_value))}."
    parts = [f"{value} ({', '.join(names)})" for value, names in by_value.items()]
    return f"Default: {'; '.join(parts)}."


def _define_what(values: flags.FlagValues) -> None:
    flags.DEFINE_enum(
        "dataset", datasets.DATASETS[0], datasets.DATASETS, "What to learn.", flag_values=values
    )
    flags.DEFINE_enum("method", METHODS[0], METHODS, "Optimizer.", flag_values=values)
    text = "Version of Keras: 2, or 3 (private or plain SGD, Adam and their signs)."
    flags.DEFINE_integer("keras", None, f"{text} Default: 2.", flag_values=values)
    _validate(values, "keras", lambda value: value in VERSIONS, "2 or 3")
    text = "What the network sees: the images, or their scattering transform; its mean over an "
    text += "image and its mirror image; channels standardized or whitened by statistics of noise; "
    text += "or responses to patches of random images."
    flags.DEFINE_enum("features", "none", datasets.FEATURES, text, flag_values=values)
    text = f"Network on features. Default there: {networks.HEADS[0]}."
    flags.DEFINE_enum("head", None, networks.HEADS, text, flag_values=values)
    text = "Network on images: that of the papers, or a small residual one."
    known = networks.ARCHITECTURES
    flags.DEFINE_enum("architecture", known[0], known, text, flag_values=values)
    flags.DEFINE_enum(
        "activation",
        None,
        networks.ACTIVATIONS,
        f"Activation. {_default('activation')}",
        flag_values=values,
    )
    for name, default, what in (("scale", 2.0, "s"), ("temperature", 2.0, "T")):
        text = f"{what} of the tempered sigmoid s / (1 + exp(-T x)) - o."
        _number(values, f"tempered_{name}", text, default=default)
    _number(values, "tempered_offset", "o of the tempered sigmoid.", default=1.0, low=None)
    flags.DEFINE_enum(
        "eval_split",
        "test",
        ["test", "validation"],
        "What accuracy is measured on: the test set, or held-out training examples.",
        flag_values=values,
    )
    _integer(
        values,
        "validation_examples",
        f"Training examples to hold out. {_default('validation_examples')}",
    )


def _define_privacy(values: flags.FlagValues) -> None:
    text = "Epsilon that the run may cost; the noise is calibrated to it. "
    text += _default("target_epsilon")
    _number(values, "target_epsilon", text)
    text = f"Delta of the guarantee, below 1/N. {_default('delta')}"
    _number(values, "delta", text, high=1.0)
    text = f"Largest l2 norm of an example's gradient. {_default('l2_norm_clip')}"
    _number(values, "l2_norm_clip", text)
    text = "Groups of a batch whose mean gradients are clipped; by default examples are."
    _integer(values, "num_microbatches", text)
    flags.DEFINE_bool(
        "insecure_fixed_noise",
        False,
        "For tests: makes the noise a function of --seed, so that who knows it can subtract it.",
        flag_values=values,
    )


def _define_how(values: flags.FlagValues) -> None:
    _integer(values, "epochs", f"Epochs. {_default('epochs')}")
    text = f"Expected number of examples in a batch, at most all. {_default('expected_batch_size')}"
    _integer(values, "expected_batch_size", text)
    text = "Copies of each image in a batch, each shifted by up to 2 pixels, that count as "
    text += "one example. By default images are as they are."
    _integer(values, "augmentations", text)
    text = "Rows of a batch that are worked on at a time, for large batches in little memory."
    _integer(values, "chunk_size", text)
    _number(values, "learning_rate", f"Learning rate. {_default('learning_rate')}")
    text = (
        "Learning rate over the steps: constant; linear, down to zero; or cooldown, constant and "
        f"in the last 30% of them linear down to zero. {_default('learning_rate_schedule')}"
    )
    flags.DEFINE_enum("learning_rate_schedule", None, SCHEDULES, text, flag_values=values)
    text = "Momentum of the SGD methods, beta_1 of the Adam methods, in [0, 1). "
    text += _default("momentum")
    flags.DEFINE_float("momentum", None, text, flag_values=values)
    _validate(values, "momentum", lambda value: 0 <= value < 1, "in [0, 1)")
    text = "Layers compute in bfloat16; weights, norms, sums and noise are float32. For GPUs, and "
    text += "CPUs with AMX. Default: float32."
    flags.DEFINE_bool("mixed_bfloat16", None, text, flag_values=values)
    text = "Share, times the learning rate, that each step takes off the weights. Default: none."
    _number(values, "weight_decay", text)
    text = "Fixes initial weights and sampling, but not the noise. By default nothing is fixed."
    _integer(values, "seed", text, low=0)


def _define_selection(values: flags.FlagValues) -> None:
    only = f"Only with --method={SELECTIVE_METHODS[0]} and its like."
    text = f"Expected number of examples in the batch that an update is tested on. {only} "
    text += _default("validation_batch_size")
    _integer(values, "validation_batch_size", text)
    text = f"Noise of the test, over the range of what it is added to. {only} "
    text += _default("validation_noise_multiplier")
    _number(values, "validation_noise_multiplier", text)
    text = f"Largest difference of losses that the test sees. {only} {_default('validation_clip')}"
    _number(values, "validation_clip", text)
    text = f"Noisy difference of losses, over the clip, below which updates are kept. {only} "
    text += _default("threshold")
    _number(values, "threshold", text, low=None)
    text = "Attempts in a row that may be rejected. Default: so many that it never happens. "
    _integer(values, "max_attempts", f"{text}Only with selective methods.")
    text = f"What can be observed: accepted updates alone, or every attempt. {only} "
    text += _default("selective_release")
    flags.DEFINE_enum("selective_release", None, OBSERVABILITY, text, flag_values=values)


def _define_where(values: flags.FlagValues) -> None:
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    text = "Downloads the data set if it is not in --data_dir."
    flags.DEFINE_bool("download", False, text, flag_values=values)
    text = "Folder in which --features are kept for the next run; empty: they are not kept."
    flags.DEFINE_string("features_dir", "results/features", text, flag_values=values)
    text = "Folder of this run. Default: results/classify/..., by data set, method and epsilon."
    flags.DEFINE_string("output_dir", None, text, flag_values=values)
    text = "Removes the run that is found in the folder first."
    flags.DEFINE_bool("overwrite", False, text, flag_values=values)


def _number(
    values: flags.FlagValues,
    name: str,
    text: str,
    default: float | None = None,
    low: float | None = 0.0,
    high: float = float("inf"),
) -> None:
    """Returns a finite number in the open interval (low, high)."""
    flags.DEFINE_float(name, default, text, flag_values=values)
    lowest = float("-inf") if low is None else low
    bounds = "a finite number" if low is None else "a positive, finite number"
    bounds += "" if high == float("inf") else f" below {high:g}"
    _validate(values, name, lambda value: lowest < value < high, bounds)


def _integer(values: flags.FlagValues, name: str, text: str, low: int = 1) -> None:
    flags.DEFINE_integer(name, None, text, flag_values=values)
    bounds = f"an integer of at least {low}, below 2^31"
    _validate(values, name, lambda value: low <= value < 2**31, bounds)


def _validate(
    values: flags.FlagValues, name: str, accept: Callable[[float], bool], must_be: str
) -> None:
    flags.register_validator(
        name,
        lambda value: value is None or accept(value),
        message=f"--{name} must be {must_be}.",
        flag_values=values,
    )


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)  # unless --verbosity: TensorFlow logs every checkpoint
    cli.run(main)
