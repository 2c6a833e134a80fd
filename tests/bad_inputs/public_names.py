"""Everything that is public, and is called: by the names of the packages, each object once."""

import inspect
import types

import tfdp


def public_names():
    """Returns the public classes and functions by name; an object of several names by the first."""
    found, seen = {}, set()

    def walk(package, path):
        names = getattr(package, "__all__", None)
        if names is None:  # A module of classes, such as `tfdp.priors`.
            names = [
                name
                for name, value in vars(package).items()
                if inspect.isclass(value)
                and value.__module__ == package.__name__
                and not name.startswith("_")
            ]
        for name in names:
            try:
                value = getattr(package, name)
            except ImportError:  # Of the other Keras, or of a package that is not installed.
                continue
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, types.ModuleType):
                walk(value, f"{path}.{name}")
            elif callable(value):
                found[f"{path}.{name}"] = value

    for name in sorted(tfdp.__all__, key=lambda name: name in ("keras2", "keras3")):
        value = getattr(tfdp, name)
        if isinstance(value, types.ModuleType):
            walk(value, f"tfdp.{name}")
    walk(tfdp, "tfdp")
    return found


def missing(calls, reasons, package="tfdp"):
    """Returns the public names that have neither a call nor a reason, and names that are gone.

    Args:
      calls: The names that have one; those of methods, and of calls of other forms, may follow.
      reasons: Why others have none, by name.
      package: The package that is looked at.
    """
    public = [name for name in public_names() if name.startswith(package)]
    with_call = {name.partition(" of ")[0].partition(" and ")[0] for name in calls}
    last = {name.rsplit(".", 1)[-1] for name in with_call}
    found = [
        name
        for name in public
        if name not in with_call and name not in reasons and name.rsplit(".", 1)[-1] not in last
    ]
    lasts = {name.rsplit(".", 1)[-1] for name in public}
    gone = [
        name
        for name in reasons
        if name.startswith(package) and name.rsplit(".", 1)[-1] not in lasts
    ]
    return found + [f"{name} (gone)" for name in gone]
