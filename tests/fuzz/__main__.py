"""Searches for models, losses, steps and data that break the guarantee.

python -m tests.fuzz --minutes=10 --seed=1
"""

import argparse
import collections

from tests.fuzz import fuzz, recipes


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for how long")
    parser.add_argument("--seed", type=int, default=0, help="decides on the cases")
    parser.add_argument("--cases", type=int, help="at most how many")
    parser.add_argument("--families", default=",".join(recipes.FAMILIES), help="kinds of cases")
    parser.add_argument("--mutant", help="a mechanism to take out")
    parser.add_argument("--keras", type=int, choices=[2, 3], default=2, help="its version")
    parser.add_argument("--output", default="fuzz_findings", help="folder for scripts")
    parser.add_argument("--shrink_each", type=int, default=2, help="findings of a kind to shrink")
    parser.add_argument("--verbose", action="store_true", help="print each case")
    options = parser.parse_args()
    seen = collections.Counter()

    def report(recipe, result, runner):
        if options.verbose:
            short = [b["op"] for b in recipe.get("blocks", [])] or recipe
            print(recipe["family"], short, result, flush=True)
        if result["outcome"] != "finding":
            return
        group = (recipe["family"], result["kind"])
        seen[group] += 1
        print(f"FOUND {group}: {result['detail'][:300]}", flush=True)
        if seen[group] <= options.shrink_each and options.mutant is None:
            print("  script:", fuzz.save(recipe, result, runner, options.output), flush=True)

    families = options.families.split(",")
    chosen = options.seed, options.minutes, options.cases, families, options.mutant, report
    print(fuzz.fuzz(*chosen, keras=options.keras))


if __name__ == "__main__":
    main()
