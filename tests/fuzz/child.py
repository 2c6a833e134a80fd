"""The child process: reads cases, runs their scripts, writes outcomes."""

import json
import os
import sys
import time
import traceback


def main():
    """One line of JSON in, one out; what else is written to stdout goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import tensorflow as tf

    from tests.fuzz import mutants, recipes
    from tfdp.base.tf.autotuning import without_autotuning

    tf.data.Dataset._apply_debug_options = without_autotuning  # As in `tests/conftest.py`.
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.monotonic()
        namespace = {"__name__": "case"}
        try:
            with mutants.applied(request["mutant"]):
                exec(compile(recipes.script(request["recipe"]), "case", "exec"), namespace)
                result = namespace["run"]()
        except Exception:
            result = {"outcome": "fuzzer error", "reason": traceback.format_exc()[-1500:]}
        result["seconds"] = time.monotonic() - begin
        out.write(json.dumps(result, default=str) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
