"""Kills trainings at random moments, and checks that they resume and count what was published.

python -m tests.faults --minutes=30 --seed=1
python -m tests.faults --kinds=fit --faults=step:5,fitted
"""

import argparse
import collections
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import trials


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="for how long")
    parser.add_argument("--seed", type=int, default=0, help="decides on the moments")
    parser.add_argument("--kinds", default=",".join(trials.KINDS), help="programs to kill")
    parser.add_argument("--faults", help="of one trial that is shown, in place of random ones")
    parser.add_argument("--pairs", action="store_true", help="two of a program, in one folder")
    options = parser.parse_args()
    if options.faults:
        with tempfile.TemporaryDirectory(prefix="faults_") as root:
            found = trials.trial(options.kinds, Path(root, "run"), options.faults.split(","))
        print(*found.runs, *found.problems, sep="\n")
        sys.exit(bool(found.problems))
    if options.pairs:
        wrong = 0
        for kind in trials.SHARED:
            with tempfile.TemporaryDirectory(prefix="faults_") as root:
                problems = trials.pair(kind, Path(root, "run"))
            wrong += len(problems)
            print(f"{kind}, two at a time:", *(problems or ["nothing is wrong"]), sep="\n  ")
        sys.exit(wrong > 0)
    disks = os.geteuid() == 0
    draw, end = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    counts, wrong, known = collections.Counter(), 0, {}
    with tempfile.TemporaryDirectory(prefix="faults_") as root:
        number = 0
        while time.monotonic() < end:
            kind = options.kinds.split(",")[number % len(options.kinds.split(","))]
            number += 1
            if kind not in known:
                known[kind] = trials.whole(kind, Path(root, f"{kind}_whole"))
                print(f"{kind}: {known[kind]}", flush=True)
            faults = trials.random_faults(draw, known[kind], disks)
            outcome = trials.trial(kind, Path(root, f"{kind}_{number}"), faults)
            counts[f"{kind}: trials"] += 1
            counts[f"{kind}: kills"] += outcome.kills
            counts[f"{kind}: files that a kill cut"] += outcome.unreadable
            for problem in outcome.problems:
                wrong += 1
                print(f"FOUND {kind} {faults}: {problem}", flush=True)
    for name, count in counts.items():
        print(f"{name}: {count}")
    print(f"violations: {wrong}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
