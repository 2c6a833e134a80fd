"""Cases of what lies around the step: transforms, updates, files, copies.

A recipe has `lines`, of which a finding needs only some, and `options`, which have defaults. Its
script runs from a clone.
"""

import importlib
import json
import re

import tensorflow as tf

from tests.fuzz import library
from tests.fuzz.harness import REFUSALS, Finding, Refused

FAMILIES = ("transforms", "updates", "files", "copies")


def draw(family, random):
    """A random recipe of a family."""
    recipe = importlib.import_module(f"tests.fuzz.{family}").draw(random, Pick(random))
    return {"family": family, **recipe}


class Pick:
    """Chooses one of some values."""

    def __init__(self, random):
        self.random = random

    def __call__(self, values):
        values = list(values)
        return values[int(self.random.integers(len(values)))]

    def some(self, values, most):
        """Up to `most` of them, with repetitions."""
        return [self(values) for _ in range(int(self.random.integers(1, most + 1)))]

    def fill(self, line, **choices):
        """Puts one of some values in place of each capital letter that stands alone."""
        return re.sub(r"\b[A-C]\b", lambda found: self(choices[found[0]]), line)


def script(recipe):
    text = json.dumps(recipe, indent=1)
    return (
        f'"""Found by tests.fuzz; run it from a clone."""\n\nimport json\n\n'
        f"from tests.fuzz import around\n\nRECIPE = json.loads(r'''{text}''')\n\n\n"
        "def run():\n    return around.run(RECIPE)\n\n\n"
        'if __name__ == "__main__":\n    print(json.dumps(run(), indent=1, default=str))\n'
    )


def run(recipe):
    """Runs a case; returns its outcome."""
    result = {"outcome": "ok", "fallback": False, "reference": False}
    try:
        importlib.import_module(f"tests.fuzz.{recipe['family']}").run(recipe)
    except Finding as finding:
        result.update(outcome="finding", kind=finding.kind, detail=finding.detail)
    except Refused as refused:
        result.update(outcome=refused.outcome, reason=refused.reason)
    except (*REFUSALS, TypeError, NotImplementedError) as error:
        result.update(outcome="refused", reason=f"{type(error).__name__}: {error}")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if "must resume with the privacy parameters" in text:
            result.update(outcome="refused", reason=text)
        else:
            result.update(outcome="finding", kind="exception", detail=text)
    return result


def start(recipe):
    """Begins a case anew: returns its Keras and tfdp's part for it."""
    keras, part = library.front_ends(recipe)
    keras.backend.clear_session()
    keras.utils.set_random_seed(recipe.get("seed", 0))
    tf.keras.utils.set_random_seed(recipe.get("seed", 0))
    return keras, part
