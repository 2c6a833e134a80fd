"""The wheel and the source distribution hold the package, and what is installed works."""

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import tfdp
from tests import forks
from tests.front_ends import HAS_KERAS_3, needs_keras_3
from tests.without_keras_2 import needs_keras_2
from tfdp.base import compat

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


# How `tf.keras` is chosen. The example is of Keras 3 in any case.
CHOICES = ["0", pytest.param("1", marks=needs_keras_2)]


@needs_keras_3
@pytest.mark.slow
@pytest.mark.parametrize("legacy", CHOICES)
def test_the_example_of_the_package_page_runs_from_the_wheel(legacy, built, tmp_path):
    text = (ROOT / "docs/package.md").read_text()
    (example,) = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    few_steps = "import tfdp\ntfdp.accounting.planning._LEAST_STEPS = 50\n"
    example = example.replace("import tfdp\n", few_steps)
    assert few_steps in example
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel_of(built)).extractall(installed)
    result = subprocess.run(
        [sys.executable, "-c", f"{example}\nprint('from', tfdp.__file__)"],
        cwd=tmp_path,
        # In front of a clone's editable one.
        env={**os.environ, "PYTHONPATH": str(installed), "TF_USE_LEGACY_KERAS": legacy},
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
    project = project_file()
    assert project["readme"] == "docs/package.md"
    assert "](" not in (ROOT / project["readme"]).read_text().replace("](https://", "")


def test_the_version_is_in_one_place():
    project = project_file()
    assert "version" not in project and "version" in project["dynamic"]
    for name in ("CITATION.cff", "docs/package.md", "README.md"):
        assert tfdp.__version__ not in (ROOT / name).read_text(), name


# TensorFlow Privacy cannot be imported, as on a Python that it does not support.
WITHOUT_TENSORFLOW_PRIVACY = """
import sys
sys.modules["tensorflow_privacy"] = None
import tfdp, tensorflow
"""

OF_KERAS_2 = [
    *("keras2.DPSGD", "keras2.make_private", "keras2.SelectiveModel", "keras2.PrivacyBudget"),
    *("keras2.PrivateGAN", "keras2.DPAdam", "auditing.CanaryAudit"),
]


def run_without_tensorflow_privacy(*programs):
    arguments, without = [[program] for program in programs], ["TF_USE_LEGACY_KERAS"]
    run = "import sys\nexec(sys.argv[1])"
    found = forks.run_each(run, arguments, WITHOUT_TENSORFLOW_PRIVACY, without=without)
    assert not any(process.status for process in found), [p.errors[-3000:] for p in found]
    return [process.output.splitlines() for process in found]


@pytest.mark.slow
def test_without_tensorflow_privacy_names_and_modules_of_keras_2_say_what_to_do(tmp_path):
    lines = run_without_tensorflow_privacy(NAMES, made_modules(tmp_path))
    check_names(lines[0])
    check_modules(lines[1])


NAMES = f"""
import operator, os, pydoc
import tfdp.keras2
for name in {OF_KERAS_2}:
    try:
        print(operator.attrgetter(name)(tfdp))
    except ImportError as error:
        print(type(error).__name__, error.name, error)
try:
    import tfdp.keras2.callbacks
except ImportError as error:
    print(error)
print(tfdp.auditing.epsilon_lower_bound, tfdp.auditing.BlackBoxAudit)
print(os.environ.get("TF_USE_LEGACY_KERAS"))
listed = {{"keras3", "DPSGD"}} & {{*dir(tfdp)}}
print("privacy_statement" in pydoc.render_doc(tfdp), sorted(listed))
"""


def check_names(lines):
    *errors, imported, others, chosen, listed = lines
    assert len(errors) == len(OF_KERAS_2)
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    for name, error in zip(OF_KERAS_2, errors, strict=True):
        assert error.startswith(f"ModuleNotFoundError tensorflow_privacy `tfdp.{name}` is for")
        assert f"{version} without tensorflow_privacy" in error
        if sys.version_info < (3, 12):
            assert "`pip install 'tfdp[keras2]'`" in error
        else:
            assert "Python 3.10 or 3.11" in error
    assert "is for models of Keras 2" in imported
    assert "function epsilon_lower_bound" in others and "BlackBoxAudit" in others
    assert "`tfdp.keras3.DPSGD`" in errors[0]
    assert chosen == "None"  # `tf.keras` is left to TensorFlow.
    # `help(tfdp)` works, and `dir` has what can be used.
    assert listed == ("True ['DPSGD', 'keras3']" if HAS_KERAS_3 else "True []")


def made_modules(tmp_path):
    """Also modules that are not public: each raises the error, or needs no Keras 2."""
    (tmp_path / "imports_it.py").write_text("import tensorflow_privacy")  # Mutants.
    (tmp_path / "takes_tf_keras.py").write_text(
        "import tensorflow as tf\nclass Mutant(tf.keras.Model): pass"
    )
    return f"""
import importlib, pkgutil, tfdp
tfdp.__path__.append({str(tmp_path)!r})
for name in [module.name for module in pkgutil.walk_packages(tfdp.__path__, "tfdp.")]:
    if name.startswith("tfdp.keras3"):
        continue
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        print("error" if "`tfdp.keras3" in str(error) else "another error", name)
        continue
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == name:
            if any(base.__module__.partition(".")[0] == "keras" for base in value.__mro__):
                print("class of Keras 3", name)
"""


def check_modules(lines):
    raised = {line.partition(" ")[2] for line in lines if line.startswith("error ")}
    others = [line for line in lines if not line.startswith("error ")]
    assert others == ["another error tfdp.imports_it", "class of Keras 3 tfdp.takes_tf_keras"]
    assert {"tfdp.keras2.dp_sgd", "tfdp.keras2.private_gan", "tfdp.keras2.callbacks"} <= raised


WITHOUT_TENSORFLOW_PROBABILITY = """
import sys
sys.modules["tensorflow_probability"] = None
import tfdp, tfdp.keras3
"""
OF_VAE = """
import operator, pydoc
names = ("TermWiseVAE", "priors", "likelihoods", "divergences")
for name in [name for one in names for name in (one, f"keras3.{one}")]:
    try:
        operator.attrgetter(name)(tfdp)
    except ImportError as error:
        print(error.name, error)
print(sorted({*names, "DPSGD"} & {*dir(tfdp)}), sorted({*names, "DPSGD"} & {*dir(tfdp.keras3)}))
print(tfdp.DPSGD(1.0, 1.0, 16), "TermWiseVAE" in pydoc.render_doc(tfdp.keras3))
"""


@pytest.mark.slow
@needs_keras_3
def test_without_tensorflow_probability_names_that_need_it_say_what_to_install():
    (ended,) = forks.run_each(
        "import tfdp\n" + OF_VAE,
        [[]],
        WITHOUT_TENSORFLOW_PROBABILITY,
        without=["TF_USE_LEGACY_KERAS"],
    )
    assert ended.status == 0, ended.errors[-3000:]
    *errors, listed, others = ended.output.splitlines()
    assert len(errors) == 8 and len(set(errors)) == 1
    assert errors[0].startswith("tensorflow_probability `TermWiseVAE`, `divergences`")
    assert "`pip install 'tfdp[vae]'`" in errors[0]
    assert listed == "['DPSGD'] ['DPSGD']"
    assert others.startswith("<tfdp.keras3.DPSGD") and others.endswith(" False")


@pytest.mark.slow
@needs_keras_3
def test_without_tensorflow_privacy_keras_3_trains():
    (lines,) = run_without_tensorflow_privacy("""
import keras
import numpy as np
import tensorflow as tf
import tfdp
x = np.random.default_rng(0).normal(size=(300, 8)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
audit = tfdp.auditing.BlackBoxAudit((x[:200], y[:200]), (x[200:], 1 - y[200:]), seed=0)
model, batches, budget = tfdp.keras3.make_private(
    keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(2)]),
    audit.data,
    epochs=2,
    target_epsilon=2.0,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
print(tfdp.privacy_statement(model, delta=budget.delta))
result = audit.result(model, budget.delta)
print("audited", result.epsilon, 0 < result.epsilon <= 2.0, result.passed)
print(tfdp.keras3.priors.StandardNormal(2).distribution().sample(3).shape)
print(tf.keras.layers.Dense.__module__)
""")
    *statement, audited, drawn, module = lines
    assert any("epsilon = " in line for line in statement)
    assert audited.startswith("audited") and audited.endswith("True True")
    assert drawn == "(3, 2)"  # By TensorFlow Probability.
    assert module.startswith("keras.src")


def project_file():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required(minor, *extras):
    """Returns what an environment of Python 3.`minor` gets, by name: the ranges of each package."""
    project = project_file()
    lists = [project["dependencies"], *(project["optional-dependencies"][e] for e in extras)]
    python, found = {"python_version": f"3.{minor}"}, {}
    for requirement in (Requirement(text) for texts in lists for text in texts):
        if requirement.marker is None or requirement.marker.evaluate(python):
            found[requirement.name] = found.get(requirement.name, SpecifierSet()) & (
                requirement.specifier
            )
    return found


MINORS = (10, 11, 12, 13)


def test_the_pythons_that_are_listed_are_those_that_are_allowed():
    project = project_file()
    minors = [int(text[-2:]) for text in project["classifiers"] if "Python :: 3." in text]
    allowed = SpecifierSet(project["requires-python"])
    assert minors == [minor for minor in range(20) if f"3.{minor}" in allowed] == [*MINORS]


@pytest.mark.parametrize("minor", MINORS)
def test_the_package_alone_is_for_todays_versions(minor):
    alone = required(minor)
    assert "2.3.0" in alone["numpy"] and "0.6.0" in alone["dp-accounting"]
    assert "0.4.3" in alone["dp-accounting"] and "0.5.0" not in alone["dp-accounting"]
    for name in ("tensorflow-privacy", "tf-keras", "tensorflow-probability"):
        assert name not in alone


@pytest.mark.parametrize("minor", MINORS)
def test_keras_2_brings_the_versions_that_tensorflow_privacy_asks_for(minor):
    both = required(minor, "keras2", "vae")
    has_keras_2 = (3, minor) < compat._FIRST_WITHOUT_KERAS_2
    assert ("tensorflow-privacy" in both) == has_keras_2
    assert "tf-keras" in both
    assert ("2.3.0" in both["numpy"]) == (not has_keras_2) and "1.26.4" in both["numpy"]
    assert ("0.6.0" in both["dp-accounting"]) == (not has_keras_2)
    assert ("0.25.0" in both["tensorflow-probability"]) == (not has_keras_2)
    assert "0.22.1" in both["tensorflow-probability"]


def test_the_command_is_an_entry_point():
    (entry,) = project_file()["scripts"].items()
    module, _, name = entry[1].partition(":")
    assert entry[0] == "tfdp" and callable(getattr(importlib.import_module(module), name))
