"""Makes a finding small: removes whatever it persists without."""

import copy


def shrink(recipe, run, budget=60):
    """The smallest recipe found for which `run` returns true.

    Args:
      recipe: A recipe that is a finding.
      run: From a recipe to whether it is one.
      budget: How often `run` may be called.
    """
    smaller = True
    while smaller and budget > 0:
        smaller = False
        for candidate in _smaller(recipe):
            budget -= 1
            if budget < 0:
                break
            if run(candidate):
                recipe, smaller = candidate, True
                break
    return recipe


def _smaller(recipe):
    """Recipes that are a little simpler."""
    if "lines" in recipe:
        for i in range(len(recipe["lines"])):
            yield {**recipe, "lines": recipe["lines"][:i] + recipe["lines"][i + 1 :]}
        for key in recipe["options"]:
            fewer = {k: v for k, v in recipe["options"].items() if k != key}
            yield {**recipe, "options": fewer}
        return
    if "blocks" not in recipe:
        for key in ("steps", "features", "rows"):
            if recipe.get(key, 0) > 8:
                yield {**recipe, key: recipe[key] // 2}
        return
    trials = recipe["trials"]
    if len(trials) > 1:
        yield from ({**recipe, "trials": [trial]} for trial in trials)
    for i in range(len(recipe["blocks"])):
        yield {**recipe, "blocks": recipe["blocks"][:i] + recipe["blocks"][i + 1 :]}
    simple = {"jit": False, "rule": "flat", "clip": 1.0, "dtype": "float32", "step": "plain"}
    for key, value in {**simple, "loss": 0, "masking": 0, "each": 1}.items():
        if recipe.get(key, value) != value:
            yield {**recipe, key: value}
    if recipe["rows"] > 2:
        yield {**recipe, "rows": recipe["rows"] - 1}
    for i, size in enumerate(recipe["shape"]):
        if size > 1:
            yield {**recipe, "shape": [*recipe["shape"][:i], size // 2, *recipe["shape"][i + 1 :]]}
    if len(trials) != 1:
        return
    for key, value in {
        "padding": False,
        "before": False,
        "dropped": False,
        "rest": ["zero", 0.0],
    }.items():
        if trials[0].get(key, value) != value:
            yield {**recipe, "trials": [{**trials[0], key: value}]}
    for i, kind in enumerate(trials[0]["kinds"]):
        if kind != ["normal", 0]:
            simpler = copy.deepcopy(trials[0])
            simpler["kinds"][i] = ["normal", 0]
            yield {**recipe, "trials": [simpler]}
