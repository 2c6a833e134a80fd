"""Where tfdp uses private parts of other packages: `python tools/private_apis.py [--write]`.

Writes docs/private_apis.md, from `tfdp.base.private_apis.INDEX` and from the code. A test compares
both: a private part that is used and not in the index, or the other way round, fails it.
"""

import ast
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/private_apis.md"
_PRIVATE = re.compile(
    r"(tensorflow\.(python|compiler)|keras\.src|tf_keras\.src|tensorflow_privacy\.privacy)\.[\w.]+"
)
# Private names of Python, or of objects that are tfdp's own.
_OWN = {"_asdict", "_columns", "_getframe"}
_ACCESS = ("getattr", "hasattr", "setattr")
# Stubs that tfdp makes itself, and prefixes of names that are looked up by `private_apis`.
_NOT_USED = re.compile(r"tensorflow_privacy\.privacy\.estimators\..*")


def own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Returns the names that tfdp gives to functions, classes and attributes of its own."""
    names = set(_OWN)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add(node.attr)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Constant) and re.fullmatch(r"_tfdp\w*", str(node.value)):
                names.add(node.value)
    return names


def uses(folder: pathlib.Path = ROOT / "tfdp") -> dict[str, set[str]]:
    """Returns the modules that use each private part: by full name, or dot and attribute."""
    files = sorted(folder.rglob("*.py"))
    trees = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): ast.parse(path.read_text())
        for path in files
        if path.name != "private_apis.py"
    }
    own, found = own_names(trees), collections.defaultdict(set)
    for module, tree in trees.items():
        for name in _named(tree):
            found[name].add(module)
        for name in _attributes(tree):
            if name not in own:
                found[f".{name}"].add(module)
    return found


def compared() -> tuple[set[str], set[str]]:
    """Returns what is used and not in the index, and what is in the index and not used.

    Of a module that is looked up by its name, every part that is in the index counts as used.
    """
    from tfdp.base import private_apis

    names, found = {api.name for api in private_apis.INDEX}, set(uses())
    used = {name for name in found if not any(is_part(one, name) for one in names)}
    return used, {name for name in names if not any(is_part(name, one) for one in found)}


def is_part(name: str, whole: str) -> bool:
    """Returns whether a name is another one or begins with it."""
    return name == whole or name.startswith(f"{whole}.")


def _named(tree: ast.Module) -> set[str]:
    """Returns full names: imported ones, with their attributes, and those in strings."""
    found, aliases = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _PRIVATE.fullmatch(f"{node.module}.x"):
            aliases |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
        elif isinstance(node, ast.Constant) and _PRIVATE.fullmatch(str(node.value)):
            found.add(node.value)
    found.update(aliases.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in aliases:
                found.add(f"{aliases[node.value.id]}.{node.attr}")
            if isinstance(node.value, ast.Attribute) and node.value.attr == "__internal__":
                found.add(f"tf.__internal__.{node.attr}")
    return {name for name in found if not _NOT_USED.fullmatch(name)}


def _modules(tree: ast.Module) -> set[str]:
    """Returns the names of what a module imports from private modules."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    private = [node for node in imports if _PRIVATE.fullmatch(f"{node.module}.x")]
    return {name.asname or name.name for node in private for name in node.names}


def _attributes(tree: ast.Module) -> set[str]:
    """Returns private attributes of objects, also of `getattr` and the like."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in _modules(tree)):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = node.func.id in _ACCESS and len(node.args) > 1
            if named and isinstance(node.args[1], ast.Constant):
                found.add(str(node.args[1].value))
    return {name for name in found if re.fullmatch(r"_[a-z]\w*", name)}


def page() -> str:
    """Returns the page of the index."""
    from tfdp.base import private_apis

    without = {private_apis.IMPORT: "not imported; the error names it", private_apis.USE: "error"}
    lines = [
        "# Private parts of other packages",
        "",
        "What tfdp uses of TensorFlow, Keras and TensorFlow Privacy that is not public, and what",
        "happens with a version that lacks it. For those who move tfdp to a new version: run the",
        "tests with it, and `python tools/private_apis.py` after a change.",
        "",
        "| name | why | without | where |",
        "|---|---|---|---|",
    ]
    found = uses()
    for api in private_apis.INDEX:
        users = {m for name in found if is_part(api.name, name) for m in found[name]}
        where = ", ".join(sorted(m.removeprefix("tfdp.") for m in users))
        gone = without.get(api.without, api.without)
        lines.append(f"| `{api.name}` | {api.why} | {gone} | {where} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
