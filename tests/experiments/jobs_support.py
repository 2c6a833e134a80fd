"""What the tests of `experiments.jobs`, and of what runs jobs, share."""

import concurrent.futures
import dataclasses
import json

from absl import flags

from experiments import jobs, tune

TABLES = """
[rows.DPSGD]
method = "dpsgd"
non_private = "SGD"

[rows.DPSignSGD]
method = "dpsignsgd"
non_private = "SGD"

[rows.SGD]
method = "sgd"

[notes]
DPAGD = "is elsewhere"

[tables.tiny]
title = "A tiny table"
epsilons = [1.0]
non_private = { digits = 98.5 }

[tables.tiny.published.digits]
DPSGD = [50.0]
DPSignSGD = ["-"]
DPAGD = [60.0]

[[search]]
rows = ["DPSGD", "DPSignSGD"]
datasets = ["digits"]
epsilons = [1.0]
fixed = { epochs = 1, expected_batch_size = 719 }
grid = { learning_rate = [0.002, 0.2] }

[[search]]
rows = ["SGD"]
datasets = ["digits"]
fixed = { epochs = 1, expected_batch_size = 719 }
"""


class WorkersHere:
    """In the place of `jobs._Workers`: runs jobs in this process, which has TensorFlow already."""

    def __init__(self, processes, run=None):
        self.ran = []
        self.run = run

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def begin(self, job, places):
        self.ran.append(job)
        future = concurrent.futures.Future()
        try:
            future.set_result((self.run or jobs._run)(job, places))
        except Exception as error:
            future.set_exception(error)
        return future


def parse(module, folder, *arguments):
    """Flags of a command that runs jobs, everything under `folder`, its tables in tables.toml."""
    values = flags.FlagValues()
    module.define_flags(values)
    places = [
        f"--tables={folder / 'tables.toml'}",
        f"--searches={folder / 'searches.jsonl'}",
        f"--runs_dir={folder / 'unfinished'}",
        f"--features_dir={folder / 'features'}",
    ]
    if module is not tune:
        places.append(f"--output_dir={folder / 'results'}")
    values([module.__name__, *places, *arguments])
    return values


def line(job, accuracy, **settings):
    """The line that a finished job leaves, as it is read again."""
    written = {
        **{"dataset": job.dataset, "row": job.row, "target_epsilon": job.target_epsilon},
        **{"seed": job.settings.seed, "accuracy": accuracy},
        "settings": {**dataclasses.asdict(job.settings), **settings},
    }
    return json.loads(json.dumps(written))
