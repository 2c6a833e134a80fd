"""The examples of the docstrings and of the README run as written."""

import ast
import doctest
import importlib
import json
import pathlib
import re
import types

import dp_accounting
import pytest

import tfdp
from tests import forks
from tests.front_ends import HAS_KERAS_3, keras, needs_keras_3
from tests.page_examples import (
    blocks_of,
    in_few_steps,
    run_blocks,
    run_examples,
    shortened,
    version_of,
)
from tfdp.accounting import sampling

ROOT = pathlib.Path(__file__).parent.parent
# Modules that have a template of docstrings, and those whose classes get them.
TEMPLATES = {"tfdp.step.selective": ["tfdp.keras2.dpsur", "tfdp.keras3.dpsur"]}
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "tfdp").rglob("*.py")
    if ">>> " in path.read_text()
)
MODULES = [module for name in WITH_EXAMPLES for module in TEMPLATES.get(name, [name])]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0


@needs_keras_3
def test_every_public_name_has_an_example_or_a_docstring():
    import tfdp

    for name in tfdp.__all__:
        assert getattr(tfdp, name).__doc__, name


# A page, and how many privacy statements its examples print.
PAGES = {
    "docs/correlated_noise.md": 0,
    "docs/data.md": 0,
    "docs/dpsur.md": 1,
    "docs/fine_tuning.md": 0,
    "docs/from_opacus.md": 0,
    "docs/from_tf_privacy.md": 1,
    "docs/gan.md": 1,
    "docs/keras2.md": 1,
    "docs/keras3.md": 1,
    "docs/label_privacy.md": 1,
    "docs/noise_schedules.md": 0,
    "docs/random_allocation.md": 0,
    "docs/relation.md": 0,
    "docs/own_steps.md": 2,
    "docs/private_selection.md": 2,
    "docs/quickstart.md": 2,
    "docs/selective_release.md": 0,
    "docs/sharp_edges.md": 1,
    "docs/sparse_embeddings.md": 0,
    "docs/subgroups.md": 0,
    "docs/user_level.md": 1,
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("path", [p for p in PAGES if HAS_KERAS_3 or version_of(p) == 2])
def test_examples_of_pages(path, capsys):
    run_examples(path, few_steps=True)
    assert capsys.readouterr().out.count("epsilon = ") == PAGES[path]


WITH_KERAS_3 = """
import sys
import tensorflow as tf
from tests import page_examples
page_examples.run_examples(sys.argv[1], few_steps=True)
assert tf.keras.__version__.startswith("3.")
"""


@needs_keras_3
@pytest.mark.slow
def test_examples_where_tf_keras_is_keras_3():
    """There, nothing stands in for the names of `tfdp`."""
    (ended,) = forks.run_each(
        WITH_KERAS_3,
        [["docs/quickstart.md"]],
        "import tfdp",
        without=["TF_USE_LEGACY_KERAS"],
        rewritten=True,
    )
    assert ended.status == 0, ended.errors[-3000:]
    assert ended.output.count("epsilon = ") == PAGES["docs/quickstart.md"]


def texts_of(path):
    return "".join(re.findall(r"```text\n(.*?)```", (ROOT / path).read_text(), re.DOTALL))


def test_the_noise_of_a_run_is_what_the_page_shows(capsys):
    run_examples("docs/choosing.md")
    assert capsys.readouterr().out == texts_of("docs/choosing.md")


@needs_keras_3
def test_privacy_in_numbers_is_what_the_page_shows(capsys):
    run_examples("docs/privacy_in_numbers.md")
    printed = capsys.readouterr().out
    assert printed.count("\n") == 11 and texts_of("docs/privacy_in_numbers.md").startswith(printed)


@needs_keras_3
def test_the_example_of_the_readme(capsys):
    (block,) = blocks_of("README.md")
    assert blocks_of("docs/index.md") == [block]
    with in_few_steps():
        run_blocks([block])
    assert capsys.readouterr().out.count("epsilon = ") == 1


def test_every_page_with_examples_is_run():
    """Pages of other tests are named below; the package's page is run from the wheel."""
    others = {"accounting", "auditing", "choosing", "guarantee", "survey", "vae", "package"}
    others |= {"index", "privacy_in_numbers"}
    run = {pathlib.Path(path).stem for path in PAGES} | others
    # scaling.md needs several devices: tests/step/test_replicas.py; others show excerpts.
    excerpts = {"scaling", "noise"}
    for page in (ROOT / "docs").glob("*.md"):
        assert "```python" not in page.read_text() or page.stem in run | excerpts, page.name


def messages():
    """The constant parts of the strings of tfdp's code."""
    for path in (ROOT / "tfdp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.split(r"\{\w*\}", node.value)


def missing_parts(quote, known):
    """The parts of a quoted message, between its dots, that no message has."""
    parts = [part.strip(" .") for part in " ".join(quote.split()).split("...")]
    return [part for part in parts if part and not any(part in message for message in known)]


def test_messages_that_are_quoted_are_those_of_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quotes, known = re.findall(r'\*\*"(.*?)"', page, re.DOTALL), list(messages())
    assert len(quotes) > 30
    assert not [quote for quote in quotes if missing_parts(quote, known)]
    assert missing_parts("Training must go on with the parameters", known)  # Not said so.


README = (ROOT / "README.md").read_text()


def torn_tables(page):
    """First lines of tables that have no head, or rows of other lengths."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [re.sub(r"`[^`]*`|\\\|", "", row).count("|") for row in table.splitlines()]
        if len(rows) < 2 or set(table.splitlines()[1]) - set("|-: ") or len(set(rows)) > 1:
            yield table.splitlines()[0]


def test_no_table_is_torn():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert [head for page in pages for head in torn_tables(page.read_text())] == []
    assert list(torn_tables("| a | b |\n| 1 | 2 |\n")) == ["| a | b |"]  # It has no head.
    assert list(torn_tables("| a | b |\n|---|---|\n| 1 |\n")) == ["| a | b |"]


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


def ratios_of_programs(page):
    """The ratios of private to plain steps, of everyday programs of Keras 3."""
    table = page.partition("\nKeras 3: `python -m benchmarks.ports")[2].partition("\nKeras 2: ")[0]
    return [float(ratio) for ratio in re.findall(r"\| \*\*([\d.]+)\*\* \(", table)]


def test_the_cost_of_a_step_in_the_readme_is_what_was_measured():
    ratios = ratios_of_programs((ROOT / "docs/benchmarks.md").read_text())
    said = f"In {len(ratios)} everyday programs, a private step took"
    assert f"{said} {min(ratios):.1f} to {max(ratios):.1f} times" in " ".join(README.split())


PEERS = {"opacus": r"opacus[ =]+(\d[\w.]*\w)", "jax": r"jax[-_]privacy[ =]+(\d[\w.]*\w)"}


def versions_of_peers(texts):
    text = " ".join(texts)
    return {name: set(re.findall(PEERS[name], text, re.IGNORECASE)) for name in PEERS}


def test_all_pages_compare_with_the_same_versions_of_peers():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    found = versions_of_peers(page.read_text() for page in pages)
    assert [len(versions) for versions in found.values()] == [1, 1], found
    assert versions_of_peers([README]) == found
    assert len(versions_of_peers([README, "of Opacus 1.5.4"])["opacus"]) == 2  # It can fail.


@needs_keras_3
def test_every_public_name_is_in_the_reference():
    import tfdp

    listed = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    packages = [
        *(tfdp, tfdp.accounting, tfdp.auditing, tfdp.clipping, tfdp.contrib, tfdp.data),
        *(tfdp.contrib.pate, tfdp.correlated_noise, tfdp.evaluation, tfdp.keras2, tfdp.keras3),
        tfdp.schedules,
    ]
    for package in packages:
        for name in package.__all__:
            if not isinstance(getattr(package, name), types.ModuleType):
                assert re.search(rf":: {name}\n", listed), f"{package.__name__}.{name}"


@needs_keras_3
@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_model", "fine_tuning", "synthetic_data"])
def test_tutorials(name, monkeypatch):
    """The code of the notebooks runs, and is what their output is from, but for its length."""
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(ROOT)
    notebook = json.loads((ROOT / f"docs/tutorials/{name}.ipynb").read_text())
    names = {"__name__": name}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["execution_count"], "run `bash run docs --execute`"
            assert not [o for o in cell["outputs"] if o["output_type"] == "error"]
            with in_few_steps():
                exec(shortened("".join(cell["source"])), names)


@needs_keras_3
@pytest.mark.slow
def test_examples_of_batch_wise_losses(capsys):
    names = run_examples("docs/vae.md")
    assert names["decorrelated"].optimizer.ledger.steps == 40
    assert capsys.readouterr().out.count("epsilon = ") == 1


def rows_of(path, title):
    """The cells of the rows of a table, below the title of its first column."""
    lines = (ROOT / path).read_text().split(f"\n| {title} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace(",", "") for cell in line.split("|")[1:-1]] for line in lines]


def test_the_table_of_curves_is_what_the_ledger_says():
    settings = [(1, 20, 400), (0.328, 9.4, 2000), (256 / 60_000, 1.1, 3510), (0.01, 1, 1000)]
    settings += [(256 / 60_000, 0.743, 1170), (0.001, 0.3, 1)]
    rows = rows_of("docs/accounting.md", "training")
    for (q, noise, steps), (name, *shown) in zip(settings, rows, strict=True):
        assert f"noise {noise}" in name and f"{steps} step" in name
        ledger = tfdp.accounting.PrivacyLedger()
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise))
        ledger.record(step if q < 1 else step.event, steps)
        curve = ledger.trade_off()
        gaussian, rates = curve.gaussian_dp(1e-5), map(curve.true_positive_rate, (0.001, 0.01))
        mu, regret, *others = map(float, shown)
        assert [gaussian.mu, curve.advantage, *rates] == pytest.approx([mu, *others], abs=6e-5)
        assert gaussian.regret == pytest.approx(regret, rel=0.1, abs=5e-6)


def test_the_table_of_rows_is_what_batches_have():
    for name, tau, *rows in rows_of("docs/accounting.md", "batches"):
        assert name and [
            sampling.padded_batch_size(60_000, size, float(tau)) for size in (64, 256, 2048)
        ] == list(map(int, rows))


def test_examples_of_accounting(capsys):
    run_examples("docs/accounting.md")
    interval, _, curve = capsys.readouterr().out.partition("\n")
    assert interval.startswith("EpsilonInterval(lower=1.828")
    assert curve == texts_of("docs/accounting.md")


@needs_keras_3
@pytest.mark.slow
def test_examples_of_the_guarantee(capsys):
    names = run_examples("docs/guarantee.md")
    printed = capsys.readouterr().out
    assert "`map` must not be used on Poisson batches" in printed
    assert "refused: True\n1\n" in printed
    assert "running_mean/mean" in printed
    assert names["before"] < names["after"]


@pytest.mark.slow
def test_examples_of_auditing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of("docs/auditing.md", shorten=True)
    few = {
        "models=8": "models=4",
        "steps_per_epoch=100": "steps_per_epoch=20",
        "((1.0, 5000), (4.0, 1000), (8.0, 1000))": "[(8.0, 1000)]",
    }
    for text, shorter in few.items():
        assert any(text in block for block in blocks)
        blocks = [block.replace(text, shorter) for block in blocks]
    names = run_blocks(blocks, version=2)
    printed = capsys.readouterr().out
    assert "8.0 1000 {'clopper_pearson': 2.13" in printed
    assert printed.count("Attack on 4 models") == 3
    assert names["result"].steps == 88 and names["result"].lower_bound > 1
    # At chance the standard deviation is 0.017.
    seen, unseen = (names["attacks"][name].auc for name in ("not_private", "private"))
    assert seen > 0.6 > unseen
    assert {path.name for path in tmp_path.iterdir()} == {"audit.png", "audit.md", "lira.png"}


@needs_keras_3
@pytest.mark.slow
def test_examples_of_the_survey(capsys):
    keras.utils.set_random_seed(0)  # Initial weights; keys are those of the test.
    names = run_examples("docs/survey.md")
    printed = capsys.readouterr().out
    assert "as counted: epsilon = 4.11\none draw a step: epsilon = 329.44\n" in printed
    assert names["sparse"].evaluate(names["x_test"], names["y_test"], verbose=0)[1] > 0.6
    trained = names["sparse"].count_params() - 64 * 128
    assert trained == 64 * 128 // 10 + 128 * 10 + 10
    assert names["student"].evaluate(names["x_rest"], names["y_rest"], verbose=0)[1] > 0.6
    assert names["auc"] > 0.9
    assert (names["similarity"].argmax(axis=1) == names["classes"]).sum() >= 8
