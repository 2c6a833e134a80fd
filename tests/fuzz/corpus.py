"""Recipes that were findings once: they show that the fuzzer finds mutants."""

_TRIAL = {
    "seed": 1,
    "victim": 0,
    "kinds": [["normal", 0], ["normal", 0]],
    "rest": ["zero", 0.0],
    "ids": [0],
    "padding": False,
    "before": False,
    "dropped": False,
    "moderate": False,
}
_RECIPE = {
    "family": "net",
    "seed": 2,
    "dtype": "float32",
    "shape": [4],
    "ids": 0,
    "id_type": "int32",
    "rows": 7,
    "engine": "one_pass",
    "jit": False,
    "rule": "flat",
    "clip": 0.01,
    "step": "plain",
    "loss": 0,
    "masking": 0,
}


def _recipe(number, family, blocks, trial=None, **more):
    chosen = [{"op": op, "k": list(k)} for op, *k in blocks]
    trials = [{**_TRIAL, **(trial or {})}]
    return number, {**_RECIPE, **more, "family": family, "blocks": chosen, "trials": trials}


_TINY = {"kinds": [["constant", -20.0], ["constant", 16.0]]}
_OUT_OF_RANGE = {"kinds": [["normal", 0], ["scaled", 4.0]], "ids": [4, 5]}
_DENSE = ("dense", 0, 0, 1)

# (number of the finding in the list of the issue, recipe)
CORPUS = [
    _recipe(1, "extreme", [_DENSE], _TINY, shape=[500], clip=1e-3, loss=1),
    _recipe(
        2, "broadcast", [("matmul", 2, 0, 0)], {"moderate": True},
        shape=[4, 3], rows=6, engine="vectorized", loss=5,
    ),
    _recipe(
        3, "ids", [("tied_lookup", 0, 0, 0)], _OUT_OF_RANGE,
        shape=[2], ids=4, jit=True, clip=1.0, seed=4,
    ),
    _recipe(5, "streams", [("dropout", 0, 0, 0), _DENSE], shape=[16], rows=9, seed=5),
    _recipe(7, "outside", [_DENSE], step="nested_rows"),
    _recipe(7, "outside", [_DENSE], step="cond_scalar", engine="vectorized"),
    _recipe(7, "outside", [_DENSE], step="while_captured"),
    _recipe(9, "state", [("saved_variable", 0, 0, 0), _DENSE]),
    _recipe(9, "state", [("table", 0, 0, 0), _DENSE]),
    _recipe(9, "state", [("metric", 0, 0, 0), _DENSE], engine="vectorized"),
]  # fmt: skip


def of(number):
    """The recipes for a finding of the list."""
    return [recipe for n, recipe in CORPUS if n == number]
