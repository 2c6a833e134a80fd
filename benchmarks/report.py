"""Tables, files and pictures of measurements."""

import dataclasses
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.contestants import CONTESTANTS
from benchmarks.turns import Measurement, plain_of

NOTHING = "–"
# Beyond this, PyTorch's times multiply: its threads wait for each other at every operation.
BUSY = 0.1
_COLORS = {"keras": "#3b6fb6", "torch": "#d9822b", "jax": "#4f9d69"}


def step_table(measurements: Sequence[Measurement]) -> str:
    """Returns a Markdown table of measurements on one network, batch by batch."""
    lines = [
        "| rows | step | median ms | quartiles ms | CPU time ms | × own plain step | "
        "× plain Keras | first step s | peak MiB | peak − before MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for batch, group in by_batch(measurements).items():
        for m in group:
            cells = [str(batch), CONTESTANTS[m.contestant].title, *_cells(m, group)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_batch(measurements: Iterable[Measurement]) -> dict[int, list[Measurement]]:
    """Measurements by their number of rows, in the order in which they come."""
    groups: dict[int, list[Measurement]] = {}
    for m in measurements:
        groups.setdefault(m.settings.batch, []).append(m)
    return groups


def _cells(m: Measurement, group: Sequence[Measurement]) -> list[str]:
    if not m.seconds:
        return [m.reason or "not measured", *[NOTHING] * 7]
    low, median, high = (1e3 * value for value in m.quartiles)
    keras = next((other for other in group if other.contestant == "keras_sgd"), None)
    return [
        f"{median:.1f}",
        f"{low:.1f} to {high:.1f}",
        f"{1e3 * statistics.median(m.cpu):.1f}" if m.cpu else NOTHING,
        ratio(m, plain_of(CONTESTANTS[m.contestant], group)),
        ratio(m, keras),
        f"{m.first:.2f}",
        f"{m.peak:.0f}",
        f"{m.growth:.0f}",
    ]


def ratio(m: Measurement | None, base: Measurement | None) -> str:
    """Returns the ratio of two medians, where both were measured."""
    if m is None or base is None or not m.seconds or not base.seconds:
        return NOTHING
    return f"{m.median / base.median:.2f}"


def ratio_table(measurements: Sequence[Measurement]) -> str:
    """Returns a Markdown table of the ratios that the project sets itself goals for."""
    names = [
        ("private / plain Keras", "tfdp_one_pass", "keras_sgd"),
        ("Opacus ghost / tfdp", "opacus_ghost", "tfdp_one_pass"),
        ("JAX-Privacy / tfdp", "jax_privacy", "tfdp_one_pass"),
        ("TF-Privacy / tfdp", "tf_privacy", "tfdp_one_pass"),
        ("tfdp vectorized / one-pass", "tfdp_vectorized", "tfdp_one_pass"),
        ("secure noise / without", "tfdp_secure", "tfdp_one_pass"),
        ("DPSUR attempt / DP-SGD step", "tfdp_dpsur", "tfdp_one_pass"),
    ]
    lines = [
        f"| rows | {' | '.join(name for name, _, _ in names)} | private / plain Keras, CPU time | "
        "peak memory, private / plain | peak − before, private / plain |",
        "|---|" + "---|" * (len(names) + 3),
    ]
    for batch, group in by_batch(measurements).items():
        found = {m.contestant: m for m in group}
        cells = [ratio(found.get(above), found.get(below)) for _, above, below in names]
        private, plain = found.get("tfdp_one_pass"), found.get("keras_sgd")
        cells += [cpu_ratio(private, plain), *memory_ratios(private, plain)]
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cpu_ratio(m: Measurement | None, base: Measurement | None) -> str:
    """Returns the median of the ratios of CPU time, turn by turn, where both were measured."""
    if m is None or base is None or not m.cpu or not base.cpu:
        return NOTHING
    return f"{statistics.median(a / b for a, b in zip(m.cpu, base.cpu, strict=True)):.2f}"


def memory_ratios(m: Measurement | None, base: Measurement | None) -> tuple[str, str]:
    """Returns the ratios of the peaks, and of the peaks beyond what was held before."""
    if m is None or base is None or not m.seconds or not base.seconds:
        return NOTHING, NOTHING
    return f"{m.peak / base.peak:.2f}", f"{m.growth / base.growth:.2f}"


def versions(measurements: Sequence[Measurement]) -> str:
    """Returns the machine, and the versions of everything that ran, as a Markdown list."""
    lines = [f"- Machine: {machine()}"]
    seen: dict[str, dict[str, str]] = {}
    for m in measurements:
        if m.versions:
            seen.setdefault(CONTESTANTS[m.contestant].framework, m.versions)
    titles = {"keras": "Keras and tfdp", "torch": "PyTorch and Opacus", "jax": "JAX"}
    for framework, found in seen.items():
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        lines.append(f"- {titles[framework]}: {listed}")
    others = [m.others for m in measurements if m.others is not None]
    if others:
        lines.append(
            f"- Other processes used up to {max(others):.0%} of the processors during the turns"
            + (": **too much; measure again.**" if max(others) > BUSY else ".")
        )
    return "\n".join(lines)


def machine() -> str:
    """Returns what the processor, its cores, the system and the GPUs are."""
    return ", ".join([cpu_model(), f"{os.cpu_count()} cores", platform.system(), *gpu_models()])


def gpu_models() -> list[str]:
    """Returns the names that the GPUs of NVIDIA give themselves."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # No driver, or no GPU.
        return []
    return found.stdout.splitlines()


def cpu_model() -> str:
    """Returns the name that the processor gives itself."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write_json(path: str, options: dict[str, Any], measurements: Sequence[Measurement]) -> None:
    """Writes everything that was measured."""
    content = {
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "gpus": gpu_models(),
        },
        "options": options,
        "measurements": [{**dataclasses.asdict(m), "median": m.median} for m in measurements],
    }
    with open(path, "w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure and its axes `[rows, columns]`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_steps(path: str, measurements: Sequence[Measurement]) -> None:
    """Draws a bar for each contestant: time per step, one picture per batch."""
    groups = by_batch(m for m in measurements if m.seconds)
    if not groups:
        raise ValueError("Nothing was measured: there is nothing to draw.")
    most = max(len(group) for group in groups.values())
    figure, axes = new_figure(1, len(groups), 7 * len(groups), 1.2 + 0.4 * most)
    for one, (batch, group) in zip(axes[0], groups.items(), strict=True):
        _draw_bars(one, group)
        one.set_title(f"{group[0].problem}, {batch:,} rows", fontsize=11)
        one.set_xlabel("ms per step (logarithmic), median and quartiles")
    figure.savefig(path, dpi=150)


def _draw_bars(axes: Any, group: Sequence[Measurement]) -> None:
    contestants = [CONTESTANTS[m.contestant] for m in group]
    milliseconds = [[1e3 * value for value in m.quartiles] for m in group]
    medians = [median for _, median, _ in milliseconds]
    axes.barh(
        range(len(group)),
        medians,
        xerr=[[m - low for low, m, _ in milliseconds], [high - m for _, m, high in milliseconds]],
        color=[_COLORS[c.framework] for c in contestants],
        alpha=0.9,
        error_kw={"ecolor": "#333333", "capsize": 2, "lw": 1},
    )
    axes.set_xscale("log")
    axes.set_xlim(min(medians) / 2, max(medians) * 6)
    axes.set_yticks(range(len(group)), [c.title for c in contestants])
    axes.invert_yaxis()
    for i, (m, (_, median, high)) in enumerate(zip(group, milliseconds, strict=True)):
        own = ratio(m, plain_of(contestants[i], group))
        times = "" if own == NOTHING or not contestants[i].private else f"  ({own}×)"
        axes.text(1.1 * high, i, f"{median:.1f}{times}", va="center", fontsize=9)
