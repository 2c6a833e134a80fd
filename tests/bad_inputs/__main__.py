"""Gives every public function bad values, one argument at a time, and counts what happens.

python -m tests.bad_inputs --results=bad_inputs.jsonl

A call must refuse a bad value with a ValueError or a TypeError that names the argument and says
what was received. Prints what does otherwise, and what is accepted and not in `accepted.txt`. A
second call with the same file goes on where the first ended. `--keras=2` is for the names of
`tfdp.keras2`.
"""

import argparse
import collections
import sys

from tests.bad_inputs import accepted, cases, runner


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bad_inputs", description=__doc__)
    parser.add_argument("--results", default="bad_inputs.jsonl", help="file of the outcomes")
    parser.add_argument("--minutes", type=float, help="for how long, at most")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of a call")
    parser.add_argument("--calls", default="", help="parts of the names of calls, with commas")
    parser.add_argument("--every", type=int, default=1, help="runs one of so many cases")
    parser.add_argument("--write", action="store_true", help="adds what is accepted to the list")
    parser.add_argument("--keras", type=int, choices=[2, 3], default=3, help="its version")
    options = parser.parse_args()
    one = runner.Runner(options.limit, keras=options.keras)
    try:
        known = one.known(options.calls.split(","))
        chosen = cases.sample(known, options.every)
        found = runner.run_all(one, chosen, options.results, options.minutes)
    finally:
        one.close()
    reviewed = accepted.read()
    new = []
    counts = collections.Counter(kind for kind, _ in found.values())
    for case, (kind, detail) in found.items():
        if kind == cases.OTHER:
            print(f"OTHER {case}: {detail[:300]}")
        elif kind == cases.ACCEPTED and case.value not in reviewed[case.call, case.argument]:
            new.append(case)
            print(f"ACCEPTED {case}")
    if options.write:
        accepted.write(new)
    print(f"{len(found)} of {len(chosen)} cases: {dict(counts)}; not reviewed: {len(new)}")
    for name in known["missing"]:
        print(f"WITHOUT A CALL {name}")
    sys.exit(bool(counts[cases.OTHER] or (new and not options.write) or known["missing"]))


if __name__ == "__main__":
    main()
