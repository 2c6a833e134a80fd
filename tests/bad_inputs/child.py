"""The process that makes the calls: one line in for each case, one line of JSON out.

It may end at any of them, or hang.
"""

import json
import os
import resource
import signal
import sys
import time

_MEMORY = 8 * 2**30


def main():
    limit = float(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    from tests.bad_inputs import evil, outcomes, public_names, valid_calls, without_call
    from tests.bad_inputs.cases import OTHER, Case

    def too_long(*_):
        raise outcomes.TookTooLong

    signal.signal(signal.SIGALRM, too_long)

    def answer(something):
        out.write(json.dumps(something) + "\n")
        out.flush()

    for line in sys.stdin:
        question = json.loads(line)
        if isinstance(question, dict):
            calls = {
                name: list(make().varied)
                for name, make in valid_calls.CALLS.items()
                if any(part in name for part in question["parts"])
                and not any(part in name for part in question["without"])
            }
            package = "tfdp.keras2" if valid_calls.IS_KERAS_2 else "tfdp"
            reasons = without_call.WITHOUT_CALL
            missing = public_names.missing(valid_calls.CALLS, reasons, package)
            answer({"calls": calls, "values": list(evil.VALUES), "missing": missing})
            continue
        case = Case(*question)
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            kind, detail = outcomes.outcome(case)
        except outcomes.TookTooLong:
            kind, detail = OTHER, "hang"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        detail = detail.encode("utf-8", "backslashreplace").decode()
        answer([kind, detail, time.process_time() - begin])


if __name__ == "__main__":
    main()
