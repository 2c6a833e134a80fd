"""Times private training beside plain Keras on a GPU: a list of short parts, in order of worth.

    python -m benchmarks.gpu --minutes=8 --record=results/gpu.jsonl
    python -m benchmarks.gpu --minutes=8 --record=results/gpu.jsonl --render > gpu.md
    python -m benchmarks.gpu --small --minutes=30 --record=results/small.jsonl   # on a CPU

Each part has a process of its own and writes one line of JSON. No part begins that would likely
end later than `--minutes`; the same command goes on where it stopped. A part is plain Keras or
tfdp, as users call `fit`, with a batch (of tfdp: Poisson sampled, so many examples expected), with
or without XLA, in float32 (TF32 off, or on) or `mixed_bfloat16`. Large batches are computed in
chunks by tfdp and as a whole by Keras, so that examples a second are compared. The last parts are
the noise of 10^8 parameters, a profile, and other libraries (`--peer_python`; see
`benchmarks.step`).

Where a machine has a GPU and no TensorFlow: `benchmarks.export_xla` and `benchmarks.run_xla`.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # Peaks are what was needed.

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FLOAT32, TF32, BFLOAT16 = "float32", "tf32", "mixed_bfloat16"
CHUNK = 2048  # Examples that a private step holds at once.
LONGEST_SECONDS = 150  # Of a part.
TURNS, TURN_SECONDS = 5, 0.5


@dataclasses.dataclass(frozen=True)
class Part:
    """A measurement.

    Attributes:
      network: A key of `benchmarks.gpu_networks.NETWORKS`, or what else is measured: "noise",
        "profile NETWORK" or "peers NETWORK".
      private: Whether tfdp trains it, or plain Keras.
      batch: Examples of a step.
      compiled: Whether XLA compiles the step.
      precision: One of the types above.
    """

    network: str
    private: bool = True
    batch: int = 256
    compiled: bool = False
    precision: str = FLOAT32


def parts(small: bool) -> list[Part]:
    """Returns all parts, in their order.

    Args:
      small: Whether they are for a CPU.
    """
    image_batches = (16, 32) if small else (256, 2048, 16384)
    text_batches = (2, 4) if small else (32, 256)
    names = ("mnist_cnn", "bert", "wide_resnet", "gpt2", "bert_lora", "cifar_cnn")
    texts = ("bert", "gpt2", "bert_lora")

    def pairs(batch: int, compiled: bool, precision: str, chosen: Sequence[str]) -> Iterator[Part]:
        for name, private in itertools.product(chosen, (False, True)):
            yield Part(name, private, batch, compiled, precision)

    def both(index: int, compiled: bool, precision: str) -> list[Part]:
        of_images = [name for name in names if name not in texts]
        found = list(pairs(image_batches[index], compiled, precision, of_images))
        if index < len(text_batches):
            found += pairs(text_batches[index], compiled, precision, texts)
        return sorted(found, key=lambda part: names.index(part.network))

    result = both(1, compiled=True, precision=TF32)
    result += [Part("profile mnist_cnn", batch=image_batches[1], compiled=True, precision=TF32)]
    result += both(1, compiled=True, precision=BFLOAT16) + both(1, compiled=False, precision=TF32)
    result += [Part("noise"), Part("peers mnist_cnn", batch=image_batches[1], compiled=True)]
    result += both(0, compiled=True, precision=TF32) + both(1, compiled=True, precision=FLOAT32)
    result += [Part("profile bert", batch=text_batches[1], compiled=True, precision=TF32)]
    if not small:
        result += both(2, compiled=True, precision=TF32)
    return result


def measure(part: Part, small: bool, peer_python: str) -> dict[str, Any]:
    """Measures a part, in this process.

    Args:
      part: The part.
      small: Whether networks are small.
      peer_python: A Python that has the other libraries.

    Returns:
      What was measured, by its name.
    """
    kind, _, network = part.network.partition(" ")
    if kind == "peers":
        return {"table": _peers(network, part, peer_python)}
    import tensorflow as tf

    from benchmarks import gpu_networks

    tf.config.experimental.enable_tensor_float_32_execution(part.precision != FLOAT32)
    if kind == "noise":
        return gpu_networks.time_noise(10**6 if small else 10**8)
    training = gpu_networks.Training(
        network or part.network,
        part.private,
        part.batch,
        min(CHUNK, part.batch),
        part.compiled,
        part.precision == BFLOAT16,
        small,
    )
    if kind == "profile":
        return {"operations": training.profile()}
    return training.time(TURNS, TURN_SECONDS)


def _peers(network: str, part: Part, python: str) -> str:
    command = [sys.executable, "-m", "benchmarks.step", "--model", network, "--jit_compile"]
    command += ["--batch", str(part.batch), "--repeats", "5", "--peer_python", python]
    contestants = "keras_sgd,tfdp_one_pass,torch_sgd,opacus_ghost,jax_sgd,jax_privacy"
    command += ["--contestants", contestants]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run(
    part: Part, small: bool, peer_python: str, seconds: float = LONGEST_SECONDS
) -> dict[str, Any]:
    """Measures a part in a new process; an error is a result.

    Args:
      part: The part.
      small: Whether networks are small.
      peer_python: A Python that has the other libraries.
      seconds: The longest wait.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", json.dumps(vars(part))]
    command += ["--small"] * small + ["--peer_python", peer_python]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {seconds:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.splitlines() or ["no output"])[-1]}
    return {**json.loads(lines[-1]), "seconds_in_all": round(time.monotonic() - begin, 1)}


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that were written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_all(path: Path, minutes: float, small: bool, peer_python: str) -> None:
    """Runs the parts that are outstanding, and writes a line for each.

    Args:
      path: The file of lines.
      minutes: The longest time in all.
      small: Whether networks are small.
      peer_python: A Python that has the other libraries.
    """
    end = time.monotonic() + 60 * minutes
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {json.dumps(line["part"]) for line in read(path) if "error" not in line}
    for part in parts(small):
        left = end - time.monotonic()
        if json.dumps(vars(part)) in done:
            continue
        if left < 20:
            print("No time is left. The same command goes on from here.")
            return
        result = run(part, small, peer_python, min(left, LONGEST_SECONDS))
        with path.open("a") as file:
            file.write(json.dumps({"part": vars(part), **result}) + "\n")
        print(json.dumps(vars(part)), result.get("error") or "measured", flush=True)


HEADER = (
    "| network | batch | XLA | precision | plain, examples a second | private | plain / private | "
    "first step s, plain and private | peak MiB, plain and private |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def render(lines: Sequence[dict[str, Any]]) -> str:
    """Returns a page of Markdown: a table of pairs, and what else was measured."""
    found = {Part(**line["part"]): line for line in lines}
    rows, others = [], []
    for part, line in found.items():
        if "examples_a_second" in line and part.private:
            plain = found.get(dataclasses.replace(part, private=False), {})
            rows.append(_row(part, plain, line))
        elif "examples_a_second" not in line:
            rest = {name: value for name, value in line.items() if name != "part"}
            text = rest.get("table") or f"```json\n{json.dumps(rest, indent=1)}\n```"
            others.append(f"{part}:\n\n{text}")
    machines = sorted({line["machine"] for line in lines if "machine" in line})
    return "\n\n".join([*machines, "\n".join([HEADER, *rows]), *others])


def _row(part: Part, plain: dict[str, Any], private: dict[str, Any]) -> str:
    lines = plain, private

    def two(name: str) -> str:
        return " / ".join(f"{line[name]:,.1f}" if name in line else "–" for line in lines)

    speeds = [line.get("examples_a_second") for line in lines]
    ratio = f"**{speeds[0] / speeds[1]:.2f}**" if speeds[0] else "–"
    cells = [
        f"`{part.network}`",
        f"{part.batch:,}",
        "yes" if part.compiled else "no",
        part.precision,
        *(f"{speed:,.0f}" if speed else "–" for speed in speeds),
        ratio,
        two("first_seconds"),
        two("peak_mib"),
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, or makes a page of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8, help="longest time in all")
    parser.add_argument(
        "--record", type=Path, default=Path("results", "gpu.jsonl"), help="lines of JSON"
    )
    parser.add_argument("--small", action="store_true", help="small networks, for a CPU")
    parser.add_argument("--render", action="store_true", help="print a page of what was measured")
    parser.add_argument("--peer_python", default=sys.executable, help="has the other libraries")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        part = Part(**json.loads(options.part))
        print(json.dumps(measure(part, options.small, options.peer_python)))
    elif options.render:
        print(render(read(options.record)))
    else:
        run_all(options.record, options.minutes, options.small, options.peer_python)


if __name__ == "__main__":
    main()
