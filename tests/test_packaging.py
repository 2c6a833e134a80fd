"""The wheel and the source distribution hold the package, and what is installed works."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools

import tfdp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
FILES = ["pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds both from a copy, so that nothing is left in the clone; needs no network."""
    folder = tmp_path_factory.mktemp("package")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "_build")
    for name in ("tfdp", "docs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    # TensorFlow Privacy asks for a `packaging` that is too old for setuptools, which has its own.
    vendored = Path(setuptools.__file__).parent / "_vendor"
    program = (
        f"import sys; sys.path.insert(0, {str(vendored)!r})\n"
        "from setuptools import build_meta\n"
        "build_meta.build_sdist('dist')\n"
        "build_meta.build_wheel('dist')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / "dist"


def wheel_of(built):
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_holds_tfdp_alone(built):
    names = zipfile.ZipFile(wheel_of(built)).namelist()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"tfdp", f"tfdp-{tfdp.__version__}.dist-info"}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "tfdp").rglob("*.py")}
    assert sources | {"tfdp/py.typed"} == {name for name in names if name.startswith("tfdp/")}


@pytest.mark.slow
def test_the_source_distribution_holds_no_tests(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = [name.partition("/")[2] for name in opened.getnames()]
    assert "tfdp/py.typed" in names and "docs/guarantee.md" in names
    assert not [name for name in names if name.startswith(("tests", "experiments", "docs/_build"))]


@pytest.mark.slow
def test_the_quickstart_runs_from_the_wheel(built, tmp_path):
    text = (ROOT / "docs/package.md").read_text()
    (example,) = text.split("```python\n")[1:]
    example = example.partition("```")[0]
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel_of(built)).extractall(installed)
    result = subprocess.run(
        [sys.executable, "-c", f"{example}\nprint('from', tfdp.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},  # In front of a clone's editable one.
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "epsilon = " in result.stdout
    assert f"from {installed}" in result.stdout


def test_links_of_the_package_page_are_absolute():
    """A package index shows this page, where links to files of the repository would break."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["readme"] == "docs/package.md"
    assert "](" not in (ROOT / project["readme"]).read_text().replace("](https://", "")


def test_the_version_is_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and "version" in project["dynamic"]
    for name in ("CITATION.cff", "docs/package.md", "README.md"):
        assert tfdp.__version__ not in (ROOT / name).read_text(), name
