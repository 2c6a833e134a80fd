"""The commands of `tfdp`. None but `statement` needs TensorFlow."""

import json
from collections.abc import Callable
from typing import Any

import click
import dp_accounting

from tfdp.accounting import budget, event_codec, planning, rounding, sampling, statement
from tfdp.accounting.calibration import calibrate_noise_multiplier
from tfdp.accounting.ledger import PrivacyLedger, compose_ledgers
from tfdp.command_line import formats
from tfdp.command_line.values import COUNT, POSITIVE, PROBABILITY

_HELP = {"help_option_names": ["-h", "--help"]}


def _epilog(*lines: str) -> str:
    """Returns lines that follow the options; click leaves them as they are after a backspace."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def _options(*options: Callable) -> Callable:
    """Returns one decorator of several, in their order."""

    def decorate(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_SIZE = click.option(
    "--dataset-size", type=COUNT, required=True, help="Number of training examples, N."
)
_BATCH = click.option(
    "--batch-size", type=COUNT, required=True, help="Expected number of examples in a batch, B."
)
_LENGTH = _options(
    click.option("--epochs", type=COUNT, help="Epochs, of N / B steps each."),
    click.option("--steps", type=COUNT, help="Steps, in the place of epochs."),
)
_DELTA = click.option(
    "--delta",
    type=PROBABILITY,
    help="Delta of the guarantee; by default N^-1.1, rounded down to two digits.",
)
_SIGNS = click.option(
    "--signs",
    is_flag=True,
    help="Only signs of the noisy sums leave: DPSignAdam, DPSignSGD without momentum.",
)
_GROUP = click.option(
    "--group-size",
    type=COUNT,
    default=1,
    show_default=True,
    help="Examples that are protected together, at most: all of one person.",
)
_JSON = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the output.",
)


@click.group(
    context_settings=_HELP,
    epilog=_epilog(
        "tfdp plan --dataset-size 60000 --epsilon 2",
        "",
        "Shell completion: put this into ~/.bashrc (zsh and fish likewise)",
        '  eval "$(_TFDP_COMPLETE=bash_source tfdp)"',
    ),
)
@click.version_option(package_name="tfdp", message="%(package)s %(version)s")
def tfdp() -> None:
    """Differential privacy of trainings: what they cost, and with how much noise.

    Batches are Poisson sampled, as by tfdp.make_private; a unit of privacy is one example.
    """


@tfdp.command(
    epilog=_epilog(
        "tfdp epsilon --dataset-size 60000 --batch-size 256 --noise-multiplier 1.1 \\",
        "    --epochs 15 --delta 1e-5",
    )
)
@_SIZE
@_BATCH
@click.option(
    "--noise-multiplier",
    type=POSITIVE,
    required=True,
    help="Standard deviation of the noise over the clip.",
)
@_options(_LENGTH, _DELTA, _GROUP, _SIGNS, _JSON)
def epsilon(
    dataset_size: int,
    batch_size: int,
    noise_multiplier: float,
    epochs: int | None,
    steps: int | None,
    delta: float | None,
    group_size: int,
    signs: bool,
    form: str,
) -> None:
    """Epsilon of a training, and what an attacker can reach."""
    taken = _steps(dataset_size, batch_size, epochs, steps)
    delta = _delta(delta, dataset_size)
    budget.warn_of_delta(delta, [dataset_size])
    ledger = _ledger(dataset_size, batch_size, noise_multiplier, taken, signs)
    try:
        stated = statement.statement_of(ledger, delta, dataset_size, group_size=group_size)
    except (ValueError, dp_accounting.UnsupportedEventError) as error:
        raise click.ClickException(_in_options(error)) from error
    if form == "json":
        click.echo(_dumps({"steps": taken, **_facts(stated)}))
        return
    rows = [
        ("steps", f"{taken}"),
        ("delta", f"{delta:g}"),
        ("epsilon, upper bound", formats.upper(stated.bound.epsilon)),
        ("epsilon, lower bound", formats.lower(stated.lower)),
    ]
    if group_size > 1:
        rows.insert(2, ("group size", f"{group_size}"))
    parts = ["\n".join(formats.pairs(rows)), *map(formats.filled, stated.measures)]
    click.echo("\n\n".join(parts))


@tfdp.command(
    epilog=_epilog(
        "tfdp noise --epsilon 2 --dataset-size 60000 --batch-size 256 --epochs 15 --delta 1e-5"
    )
)
@click.option("--epsilon", "target", type=POSITIVE, required=True, help="The privacy budget.")
@_options(_SIZE, _BATCH, _LENGTH, _DELTA, _SIGNS, _JSON)
def noise(
    target: float,
    dataset_size: int,
    batch_size: int,
    epochs: int | None,
    steps: int | None,
    delta: float | None,
    signs: bool,
    form: str,
) -> None:
    """The least noise multiplier for a privacy budget."""
    taken = _steps(dataset_size, batch_size, epochs, steps)
    delta = _delta(delta, dataset_size)
    try:
        found = calibrate_noise_multiplier(
            target_epsilon=target,
            delta=delta,
            steps=taken,
            dataset_size=dataset_size,
            expected_batch_size=batch_size,
            releases_signs=signs,
        )
    except ValueError as error:
        raise click.ClickException(_in_options(error)) from error
    bound = _ledger(dataset_size, batch_size, found, taken, signs).epsilon(delta)
    if form == "json":
        reached = rounding.rounded_up(bound.epsilon)
        facts = {"noise_multiplier": found, "steps": taken, "epsilon": reached, "delta": delta}
        click.echo(_dumps(facts))
        return
    rows = [
        ("noise multiplier", f"{found:g}"),
        ("steps", f"{taken}"),
        ("delta", f"{delta:g}"),
        ("epsilon, upper bound", formats.upper(bound.epsilon)),
    ]
    click.echo("\n".join(formats.pairs(rows)))


@tfdp.command(
    epilog=_epilog("tfdp plan --dataset-size 50000 --epsilon 4 --delta 1e-5 --plot noise.svg")
)
@_SIZE
@click.option("--epsilon", "target", type=POSITIVE, required=True, help="The privacy budget.")
@_DELTA
@click.option("--epochs", type=COUNT, default=None, help="Epochs of the training; by default 20.")
@click.option(
    "--max-batch",
    type=COUNT,
    help="Largest batch; by default N / 10 or 16384, rounded down to a power of two.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True),
    help="An SVG file for a picture: the noise of the run against the batch size.",
)
@_JSON
def plan(
    dataset_size: int,
    target: float,
    delta: float | None,
    epochs: int | None,
    max_batch: int | None,
    plot: str | None,
    form: str,
) -> None:
    """Batch sizes, their noise at a privacy budget, and which size to take."""
    if max_batch is not None and max_batch > dataset_size:
        raise _bad("max_batch", f"must be at most --dataset-size, {dataset_size}", max_batch)
    if plot is not None and not plot.endswith(".svg"):
        raise _bad("plot", "must end in .svg", plot)
    try:
        planned = planning.plan(dataset_size, target, delta, epochs, max_batch)
    except ValueError as error:
        raise click.ClickException(_in_options(error)) from error
    if plot is not None:
        _write(plot, formats.plan_picture(planned))
    click.echo(_dumps(planned.to_dict()) if form == "json" else str(planned))


@tfdp.command(
    name="statement", epilog=_epilog("tfdp statement model.keras --format markdown > PRIVACY.md")
)
@click.argument("path", type=click.Path())
@_DELTA
@_GROUP
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    show_default=True,
    help="Format of the output.",
)
def statement_command(path: str, delta: float | None, group_size: int, form: str) -> None:
    """Privacy statement of a saved model, checkpoint or weights file PATH.

    The model is not loaded, and no class of yours is needed.
    """
    from tfdp.base import compat

    compat.prepare_tensorflow()
    from tfdp.step.record import file_ledger

    try:
        found = file_ledger.ledger_of_file(path)
        sizes = found.ledger.dataset_sizes
        if delta is None and not sizes:
            raise _bad("delta", "must be given: the file does not say how many examples there were")
        delta = budget.default_delta(max(sizes)) if delta is None else delta
        stated = statement.statement_of(
            found.ledger, delta, not_covered=found.not_covered, group_size=group_size
        )
        made: dict[str, Callable[[statement.Statement], str]] = {
            "text": lambda stated: str(stated).rstrip("\n"),
            "json": lambda stated: _dumps(stated.to_dict()),
            "markdown": formats.statement_markdown,
        }
        click.echo(made[form](stated))
    except (FileNotFoundError, ValueError, dp_accounting.UnsupportedEventError) as error:
        raise click.ClickException(str(error)) from error


def _steps(dataset_size: int, batch_size: int, epochs: int | None, steps: int | None) -> int:
    if batch_size > dataset_size:
        raise _bad("batch_size", f"must be at most --dataset-size, {dataset_size}", batch_size)
    if steps is not None:
        if epochs is not None:
            raise _bad("steps", "must not be given with --epochs", steps)
        name, taken = "steps", steps
    elif epochs is None:
        raise click.UsageError("Missing option '--epochs' or '--steps'.", _context())
    else:
        name, taken = "epochs", planning.steps_of(dataset_size, batch_size, epochs)
    if taken > budget.MOST_RELEASES:
        raise _bad(name, f"must make at most {budget.MOST_RELEASES} steps", f"{taken} steps")
    return taken


def _delta(delta: float | None, dataset_size: int) -> float:
    return budget.default_delta(dataset_size) if delta is None else delta


def _ledger(
    dataset_size: int, batch_size: int, noise: float, steps: int, signs: bool
) -> PrivacyLedger:
    ledger = PrivacyLedger()
    event = event_codec.sampled_gaussian(batch_size / dataset_size, noise, signs)
    ledger.record(event, steps, sampling.UNPADDED_TRUNCATION_PROBABILITY)
    return compose_ledgers([ledger], dataset_sizes=[dataset_size])


def _facts(stated: statement.Statement) -> dict[str, Any]:
    names = ("epsilon", "epsilon_lower_bound", "delta", "accountant", "epsilon_by_accountant")
    whole = stated.to_dict()
    others = ("group_size", "epsilon_by_delta", "attack_advantage", "attack_true_positive_rates")
    return {name: whole[name] for name in (*names, *others, "gaussian_dp")}


def _bad(option: str, requirement: str, value: Any = None) -> click.BadParameter:
    received = "" if value is None else f" Received: {value}."
    name = "--" + option.replace("_", "-")
    return click.BadParameter(f"{requirement}.{received}", _context(), param_hint=f"'{name}'")


def _context() -> click.Context:
    return click.get_current_context()


def _in_options(error: Exception) -> str:
    """Returns the message of an error with the options' names."""
    text = str(error)
    for argument, option in (
        ("target_epsilon", "epsilon"),
        ("expected_batch_size", "batch-size"),
        ("dataset_size", "dataset-size"),
        ("group_size", "group-size"),
    ):
        text = text.replace(f"Argument `{argument}`", f"Option `--{option}`")
        text = text.replace(f"{argument}=", f"--{option}=")
    return text


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise click.ClickException(f"'--plot': {error}") from error


def _dumps(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=2, allow_nan=False)
