"""Bazel runs each test module alone: its target must have what the module imports."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "tests/BUILD").exists(), reason="Bazel gives a test no BUILD files"
)
# What the libraries of the other packages bring along.
_WITH = {
    "//benchmarks": {"//benchmarks", "//experiments", "//tfdp"},
    "//experiments": {"//experiments", "//tfdp"},
}
_TOP = ("benchmarks", "experiments", "tfdp")


def build_file(path):
    """Returns the BUILD file of the package that a file belongs to."""
    return next(folder / "BUILD" for folder in path.parents if (folder / "BUILD").exists())


def declared(build):
    """Returns the packages of code that the tests of a package depend on."""
    (deps,) = re.findall(r"\bdeps = \[(.*?)\]", build.read_text(), re.DOTALL)
    return {one for dep in re.findall(r'"(.*?)"', deps) for one in _WITH.get(dep, {dep})}


def imported(path):
    """Returns the files of the tests, and the packages of code, that a module imports."""
    files, packages = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *[f"{node.module}.{name.name}" for name in node.names]]
        for name in names:
            if name.split(".")[0] in _TOP:
                packages.add("//" + name.split(".")[0])
            file = (ROOT / name.replace(".", "/")).with_suffix(".py")
            if name.startswith("tests.") and file.exists():
                files.add(file)
    return files, packages


def needed(path):
    """Returns the packages of code that a test module needs, also by way of what it imports."""
    packages, left, seen = set(), [path], set()
    while left:
        current = left.pop()
        seen.add(current)
        files, found = imported(current)
        packages |= found
        left += files - seen
    return packages


MODULES = sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.slow
def test_targets_depend_on_what_their_modules_import():
    missing = {
        path.relative_to(ROOT).as_posix(): sorted(lacking)
        for path in MODULES
        if (lacking := needed(path) - declared(build_file(path)))
    }
    assert not missing


def test_every_target_has_the_modules_of_all_packages_of_tests():
    packages = {build.parent for build in (ROOT / "tests").rglob("BUILD")} - {ROOT / "tests"}
    (listed,) = re.findall(r"packages = \[(.*?)\]", (ROOT / "tests/BUILD").read_text(), re.DOTALL)
    named = {f"//{package.relative_to(ROOT).as_posix()}" for package in packages}
    assert set(re.findall(r'"(.*?)"', listed)) == named


def test_targets_have_the_files_of_the_root_that_they_read():
    read = {
        name
        for path in MODULES
        for name in re.findall(r'ROOT / "(\w+\.\w+)"', path.read_text())
        if (ROOT / name).exists()
    }
    assert {"CONTRIBUTING.md", "README.md"} <= read
    assert read <= set(re.findall(r'"(.*?)"', (ROOT / "BUILD").read_text()))


def test_mutant_without_a_dependency_is_found(monkeypatch):
    monkeypatch.setitem(_WITH, "//experiments", {"//experiments"})
    path = ROOT / "tests/experiments/test_classify.py"
    assert needed(path) - declared(build_file(path)) == {"//tfdp"}
