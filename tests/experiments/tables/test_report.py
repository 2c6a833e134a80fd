"""Tables and figures of results beside published numbers; the numbers are worked out by hand."""

import io
import math
import re

import matplotlib.image
import numpy as np
import pytest
import scipy.stats

from experiments.tables.figures import draw_accuracy, draw_classes
from experiments.tables.report import (
    accuracy_section,
    accuracy_table,
    count_section,
    differences,
    other_section,
    sign_section,
    subgroup_table,
)
from experiments.tables.runs import Published, cells, check, class_accuracies, epsilon_violations

TABLE = Published(
    name="paper_3",
    title="Table 3 of a paper",
    epsilons=(0.5, 1.0),
    accuracy={
        "mnist": {"DPSGD": (93.1, 94.0), "DPSignSGD": (94.8, None)},
        "imdb": {"DPSGD": (56.4, 60.3), "DPSignSGD": (None, None)},
    },
    non_private={"mnist": 99.1, "imdb": None},
)
OTHER = Published("b", "Table 4", (0.5,), {"mnist": {"DPSGD": (94.5,)}}, {})

# Means 94.333 and 91; variances 7/3 and 1 (population: 14/9 and 2/3).
SIGN, PLAIN = (0.93, 0.94, 0.96), (0.90, 0.91, 0.92)


def run(row, target, seed, accuracy, dataset="mnist", **others):
    spent = None if target is None else 0.99 * target
    bounds = {} if target is None else {"RDP": 1.05 * target, "PLD": spent}
    given = {"dataset": dataset, "row": row, "target_epsilon": target, "seed": seed}
    privacy = {"epsilon": spent, "epsilon_by_accountant": bounds, "delta": 1e-5}
    found = {"accuracy": accuracy, "accuracy_by_class": {"0": accuracy}, "evaluated_on": "test"}
    return {**given, "settings": {"learning_rate": 1.0}, **privacy, **found, **others}


def seeds(row, epsilon, accuracies, dataset="mnist"):
    return [run(row, epsilon, seed, a, dataset) for seed, a in enumerate(accuracies)]


RUNS = [
    *seeds("DPSGD", 0.5, SIGN),
    *seeds("DPSGD", 1.0, (0.94, 0.94, 0.94)),
    *seeds("DPSignSGD", 0.5, (0.95, 0.94)),
    *seeds("DPSignSGD", 1.0, (0.96,)),
    *seeds("SGD", None, (0.99, 0.99, 0.993)),
]
BASELINES = {"DPSGD": "SGD", "DPSignSGD": "SGD"}


# What may be rendered.


def test_runs_that_count_have_no_violation():
    assert epsilon_violations(RUNS) == []
    check(RUNS)


@pytest.mark.parametrize("spent", [0.500001, math.inf, math.nan, None])
def test_largest_epsilon_of_a_cell_must_be_at_most_the_target(spent):
    runs = seeds("DPSGD", 0.5, SIGN)
    runs[1] |= {"epsilon": spent, "epsilon_by_accountant": {"PLD": spent}}
    assert epsilon_violations(runs)[0].startswith("mnist, DPSGD, target ε = 0.5: spent ε = ")
    runs[1] |= {"epsilon": 0.5, "epsilon_by_accountant": {"PLD": 0.5}}
    assert epsilon_violations(runs) == []


@pytest.mark.parametrize("bounds", [{"RDP": 0.52, "PLD": 0.4998}, {"RDP": None}, {}])
def test_epsilon_must_be_one_that_an_accountant_gave(bounds):
    runs = [run("DPSGD", 0.5, 2, 0.9, epsilon=0.45, epsilon_by_accountant=bounds)]
    assert epsilon_violations(runs) == [
        "mnist, DPSGD, target ε = 0.5, seed 2: no accountant gave ε = 0.45"
    ]


BAD = {
    "mnist, DPSGD, target ε = 0.5: spent ε = 0.6": run(
        "DPSGD", 0.5, 7, 0.9, epsilon=0.6, epsilon_by_accountant={"PLD": 0.6}
    ),
    "DPSGD, target ε = 0.5, seed 7: evaluated on 'validation'": run(
        "DPSGD", 0.5, 7, 0.9, evaluated_on="validation"
    ),
    "SGD, no privacy, seed 7: evaluated on None": run("SGD", None, 7, 0.9, evaluated_on=None),
    "DPSGD, target ε = 0.5, seed 1: there twice, with different settings": run(
        "DPSGD", 0.5, 1, 0.94, settings={"learning_rate": 2.0}
    ),
    "seed 1: there twice, with different accuracy": run("DPSGD", 0.5, 1, 0.99),
}
RENDERINGS = {
    "accuracy_table": lambda runs: accuracy_table(TABLE, runs, "mnist"),
    "accuracy_section": lambda runs: accuracy_section(TABLE, runs),
    "count_section": lambda runs: count_section([TABLE], runs),
    "differences": lambda runs: differences(runs, [("DPSignSGD", "DPSGD")]),
    "sign_section": lambda runs: sign_section(runs, [("DPSignSGD", "DPSGD")]),
    "subgroup_table": lambda runs: subgroup_table(runs, "mnist", 0.5),
    "draw_accuracy": lambda runs: draw_accuracy([TABLE], runs),
    "draw_classes": lambda runs: draw_classes(runs, "mnist", 0.5),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("render", RENDERINGS)
def test_runs_that_would_not_count_are_refused(render, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RENDERINGS[render]([*RUNS, BAD[message]])


def test_all_problems_are_named():
    with pytest.raises(ValueError) as error:
        check([*RUNS, *BAD.values()])
    assert [m for m in BAD if m not in str(error.value)] == []


def test_a_run_that_is_there_twice_counts_once():
    runs = seeds("DPSGD", 0.5, (0.93, 0.95))
    cell = cells([*runs, runs[0], dict(runs[0])])["mnist", "DPSGD", 0.5]
    assert cell.values == pytest.approx((93, 95))


# Accuracy beside the published.


def test_cell_has_the_mean_and_the_sample_deviation():
    cell = cells(RUNS)["mnist", "DPSGD", 0.5]
    assert cell.mean == pytest.approx(94 + 1 / 3)
    assert cell.deviation == pytest.approx(math.sqrt(7 / 3))
    assert str(cell) == "94.33 ± 1.53"
    alone = cells(RUNS)["mnist", "DPSignSGD", 1.0]
    assert (alone.deviation, str(alone)) == (None, "96.00")


def test_accuracy_table():
    assert accuracy_table(TABLE, RUNS, "mnist", {"DPSGD": "Not shown."}, BASELINES) == (
        "| MNIST | ε = 0.5 | ε = 1 |\n"
        "| --- | --- | --- |\n"
        "| DPSGD | **94.33 ± 1.53** (93.1) | **94.00 ± 0.00** (94.0) |\n"
        "| DPSignSGD | 94.50 ± 0.71 (94.8) ² | 96.00 ¹ |\n\n"
        "Non-private: SGD **99.10 ± 0.17** (99.1).\n\n"
        "¹ 1 seed.\n\n² 2 seeds."
    )


def test_cells_that_were_not_run_show_the_published_and_why():
    notes = {"DPSignSGD": "takes too long.", "DPSGD": "is not tried", "other": "is not here"}
    assert accuracy_table(TABLE, RUNS, "imdb", notes) == (
        "| IMDB | ε = 0.5 | ε = 1 |\n"
        "| --- | --- | --- |\n"
        "| DPSGD | – (56.4) | – (60.3) |\n"
        "| DPSignSGD | – | – |\n\n"
        "DPSGD: is not tried.\n\n"
        "DPSignSGD: takes too long."
    )


@pytest.mark.parametrize("accuracy, bold", [(0.9309, False), (0.931, True), (0.9311, True)])
def test_mean_is_bold_from_the_published_number_on(accuracy, bold):
    table = accuracy_table(TABLE, seeds("DPSGD", 0.5, [accuracy] * 3), "mnist")
    assert ("**" in table) == bold


def test_rounding_of_floats_makes_no_mean_fall_short():
    for percent in range(1, 100):
        cell = cells(seeds("DPSGD", 0.5, [percent / 100] * 3))["mnist", "DPSGD", 0.5]
        assert cell.mean == percent


def test_non_private_line_has_the_rows_of_the_tables_networks():
    runs = [*RUNS, *seeds("SGD-TS", None, (0.98, 0.98, 0.98))]
    line = "Non-private: SGD **99.10 ± 0.17** (99.1)"
    assert f"{line}.\n" in accuracy_table(TABLE, runs, "mnist", baselines=BASELINES)
    assert f"{line}, SGD-TS 98.00 ± 0.00 (99.1).\n" in accuracy_table(TABLE, runs, "mnist")
    assert "Non-private: – (99.1)." in accuracy_table(TABLE, RUNS[:3], "mnist")


def test_section_has_a_table_for_each_data_set():
    section = accuracy_section(TABLE, RUNS, {"DPSGD": "later"}, BASELINES)
    assert section.startswith("### Table 3 of a paper\n\nTest accuracy in percent at δ = 1e-05: ")
    for data in TABLE.accuracy:
        assert accuracy_table(TABLE, RUNS, data, {"DPSGD": "later"}, BASELINES) in section


def test_published_numbers_must_fit_the_epsilons():
    table = Published("a", "A", (0.5, 1.0), {"mnist": {"DPSGD": (93.1,)}}, {})
    with pytest.raises(ValueError):
        accuracy_table(table, RUNS, "mnist")


def test_count():
    assert count_section([TABLE, OTHER], RUNS) == (
        "- Table 3 of a paper: 2 of 2 cells that were run (with at least 3 seeds) are at or above "
        "the published mean; not counted: 1 with fewer seeds, 2 not run.\n"
        "- Table 4: 0 of 1 cells that were run (with at least 3 seeds) are at or above "
        "the published mean; not counted: 0 with fewer seeds, 0 not run.\n"
        "- In total: 2 of 3 cells that were run (with at least 3 seeds) are at or above "
        "the published mean; not counted: 1 with fewer seeds, 2 not run.\n\n"
        "Below the published number:\n\n"
        "| table | data set | row | ε | ours | published | gap |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| Table 4 | MNIST | DPSGD | 0.5 | 94.33 ± 1.53 | 94.5 | -0.17 |"
    )
    assert "Below" not in count_section([TABLE], RUNS)


def test_a_gap_never_reads_as_none():
    runs = seeds("DPSGD", 0.5, (0.9309, 0.931, 0.931))
    assert "| 93.1 | -0.003 |" in count_section([TABLE], runs)


# Sign against no sign.


def pair(sign, plain):
    runs = [*seeds("DPSignSGD", 0.5, sign), *seeds("DPSGD", 0.5, plain)]
    return differences(runs, [("DPSignSGD", "DPSGD")])[0]


def test_difference_has_welchs_error():
    found = pair(SIGN, PLAIN)
    assert found.difference == pytest.approx(10 / 3)
    assert found.error == pytest.approx(math.sqrt((7 / 3 + 1) / 3))


@pytest.mark.parametrize("shift", [0, 1, 2, 2.5, 3, 3.1, 3.15, 3.2, 3.3, 3.5, 4, 6])
@pytest.mark.parametrize("sizes", [(3, 3), (5, 3), (3, 8)])
def test_verdict_is_that_of_welchs_test(shift, sizes):
    random = np.random.default_rng(0)
    noise = [random.normal(0, spread, n) for spread, n in zip((1.5, 0.5), sizes, strict=True)]
    sign, plain = (0.9 + (x - x.mean()) / 100 for x in noise)
    error = np.hypot(*(x.std(ddof=1) / math.sqrt(len(x)) for x in (sign, plain)))
    sign = sign + shift * error
    significant = scipy.stats.ttest_ind(sign, plain, equal_var=False).pvalue < 0.05
    assert pair(sign, plain).verdict == ("ahead" if significant else "within noise")
    assert pair(plain, sign).verdict == ("behind" if significant else "within noise")


def test_few_seeds_are_not_judged():
    assert pair((0.99, 0.98), PLAIN).verdict == "too few seeds"
    assert pair(SIGN, (0.1,)).error is None
    assert pair(SIGN, (0.1,)).verdict == "too few seeds"


def test_cells_without_spread_are_judged():
    assert pair((0.9, 0.9, 0.9), (0.9, 0.9, 0.9)).verdict == "within noise"
    assert pair((0.9, 0.9, 0.9), (0.8, 0.8, 0.8)).verdict == "ahead"


def test_only_equal_epsilons_and_data_sets_are_compared():
    runs = seeds("DPSignSGD", 0.5, SIGN) + seeds("DPSignSGD", None, SIGN)
    runs += seeds("DPSGD", 1.0, PLAIN) + seeds("DPSGD", None, PLAIN)
    runs += seeds("DPSGD", 0.5, PLAIN, "imdb")
    assert differences(runs, [("DPSignSGD", "DPSGD")]) == []


def test_sign_section_counts_verdicts():
    runs = [
        *seeds("DPSignSGD", 0.5, (0.95, 0.951, 0.952)), *seeds("DPSGD", 0.5, PLAIN),
        *seeds("DPSignSGD", 1.0, PLAIN), *seeds("DPSGD", 1.0, (0.95, 0.951, 0.952)),
        *seeds("DPSignSGD", 2.0, PLAIN), *seeds("DPSGD", 2.0, PLAIN),
        *seeds("DPSignSGD", 4.0, (0.9,)), *seeds("DPSGD", 4.0, PLAIN),
    ]  # fmt: skip
    section = sign_section(runs, [("DPSignSGD", "DPSGD")])
    assert section.startswith(
        "With at least 3 seeds each, sign is ahead in 1, behind in 1 and within noise in 1 of 3 "
        "comparisons at equal ε (1 with fewer seeds are not judged). "
    )
    assert section.endswith(
        "| DPSignSGD - DPSGD | MNIST | 0.5 | +4.10 ± 0.58 | sign ahead |\n"
        "| DPSignSGD - DPSGD | MNIST | 1 | -4.10 ± 0.58 | sign behind |\n"
        "| DPSignSGD - DPSGD | MNIST | 2 | +0.00 ± 0.82 | within noise |\n"
        "| DPSignSGD - DPSGD | MNIST | 4 | -1.00 | too few seeds |"
    )


# Subgroups.


def classes(row, epsilon, *by_seed):
    return [
        run(row, epsilon, seed, 0.9, accuracy_by_class=by_class)
        for seed, by_class in enumerate(by_seed)
    ]


# The worst class differs from seed to seed; on average it is "2", and the best is "1".
BY_CLASS = [
    *classes(
        "DPSGD", 0.5,
        {"0": 0.70, "1": 0.96, "2": 0.80},
        {"0": 0.90, "1": 0.93, "2": 0.75},
        {"0": 0.95, "1": 0.96, "2": 0.82},
    ),
    *classes("SGD", None, {"0": 0.97, "1": 0.99, "2": 0.98}, {"0": 0.98, "1": 0.99, "2": 0.98}),
    *classes("DPSignSGD", 0.5, {"0": 0.90, "1": 0.91, "2": 0.92}),
]  # fmt: skip


def test_cells_of_no_table_are_listed_apart():
    runs = [
        *(run("DPSGD", 0.5, seed, 0.9) for seed in range(3)),
        *(run("DPSGD", 0.75, seed, 0.8) for seed in range(3)),
        run("DPIS", 0.5, 0, 0.7),
        run("SGD", None, 0, 0.99),
    ]
    published = Published("t", "T", (0.5,), {"mnist": {"DPSGD": (90.0,)}}, {"mnist": None})
    lines = other_section([published], runs).splitlines()[2:]
    assert lines == [
        "| MNIST | DPIS | 0.5 | 70.00 |",
        "| MNIST | DPSGD | 0.75 | 80.00 ± 0.00 |",
    ]
    assert other_section([published], runs[:3]) == ""


def test_classes_are_averaged_before_the_worst_is_taken():
    assert class_accuracies(BY_CLASS, "mnist", "DPSGD", 0.5) == pytest.approx(
        {"0": 85, "1": 95, "2": 79}
    )
    table = subgroup_table(BY_CLASS, "mnist", 0.5, {"DPSGD": "SGD"}, class_names={"1": "one"})
    group = "worst class | best class | gap"
    assert table == (
        f"| MNIST, ε = 0.5 | {group} | non-private | {group} | difference of gaps |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| DPSGD | 2: 79.00 | one: 95.00 | 16.00 "
        "| SGD ² | 0: 97.50 | one: 99.00 | 1.50 | +14.50 |\n"
        "| DPSignSGD ¹ | 0: 90.00 | 2: 92.00 | 2.00 | – | – | – | – | – |\n\n"
        "¹ 1 seed.\n\n"
        "² 2 seeds."
    )


def test_rows_without_classes_are_empty():
    runs = [run("DPSGD", 0.5, 0, 0.9, accuracy_by_class=None)]
    assert "| DPSGD ¹ | – | – | – |" in subgroup_table(runs, "mnist", 0.5)
    assert "| DPIS | – | – | – |" in subgroup_table(runs, "mnist", 0.5, rows=["DPIS"])
    with pytest.raises(ValueError, match="accuracy by class"):
        draw_classes(runs, "mnist", 0.5)


def test_runs_of_a_cell_must_have_the_same_classes():
    runs = classes("DPSGD", 0.5, {"0": 0.9, "1": 0.9}, {"0": 0.9})
    with pytest.raises(ValueError, match="different classes: mnist, DPSGD"):
        subgroup_table(runs, "mnist", 0.5)


# Figures.


def image(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    file.seek(0)
    return matplotlib.image.imread(file, "png")


def labels_of(figure):
    return [text.get_text() for text in figure.legends[0].texts]


def test_figure_shows_ours_the_published_and_the_non_private():
    figure = draw_accuracy([TABLE, OTHER], RUNS, BASELINES, "Tables")
    assert [panel.get_title() for panel in figure.axes] == ["MNIST", "IMDB"]
    assert figure.get_suptitle() == "Tables"
    panel = figure.axes[0]
    error_bars, signed = panel.containers
    assert list(error_bars[0].get_ydata()) == pytest.approx([94 + 1 / 3, 94])
    assert list(signed[0].get_ydata()) == pytest.approx([94.5, 96])
    (low, high), *_ = (s[:, 1] for s in error_bars[2][0].get_segments())
    assert (low + high) / 2 == pytest.approx(94 + 1 / 3)
    assert (high - low) / 2 == pytest.approx(math.sqrt(7 / 3))
    dashed = [line for line in panel.lines if line.get_linestyle() == "--"]
    shown = {tuple(line.get_ydata()) for line in dashed}
    assert shown == {(93.1, 94.0), (94.5,), (94.8,), ()}
    assert {line.get_markerfacecolor() for line in dashed} == {"white"}
    assert {line.get_color() for line in dashed} == {c[0].get_color() for c in panel.containers}
    dotted = [line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == ":"]
    assert dotted == pytest.approx([99.1, 99.1])
    assert [text.get_text() for text in panel.texts] == ["SGD: 99.1", "published: 99.1"]
    assert labels_of(figure) == ["DPSGD", "DPSignSGD", "ours, ± 1 sd", "published", "non-private"]
    assert image(figure).shape[1] == 400 and image(figure).std() > 0.01


def test_points_of_neighbouring_epsilons_stay_apart():
    rows = {f"row {i}": (90.0 + i, 91.0 + i) for i in range(10)}
    table = Published("a", "A", (3.0, 4.0), {"mnist": rows}, {})
    lines = draw_accuracy([table], []).axes[0].lines
    left, right = np.array([line.get_xdata() for line in lines if len(line.get_xdata()) == 2]).T
    assert len(set(left)) == 10 and left.max() < right.min()
    assert np.exp(np.log(left).mean()) == pytest.approx(3)


def test_legend_is_beside_the_panels():
    figure = draw_accuracy([TABLE], RUNS)
    image(figure)  # Lays it out.
    legend = figure.legends[0].get_window_extent()
    assert all(not legend.overlaps(panel.get_tightbbox()) for panel in figure.axes)


def test_figure_of_classes_shows_private_and_non_private():
    figure = draw_classes(BY_CLASS, "mnist", 0.5, {"DPSGD": "SGD"}, class_names={"1": "one"})
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("DPSGD", "DPSignSGD")
    # From the worst on: means over the rows of "2", "0", "1" are 85.5, 87.5, 93.
    assert [label.get_text() for label in first.get_yticklabels()] == ["2", "0", "one"]
    points = [list(dots.get_offsets()[:, 0]) for dots in first.collections[1:]]
    assert points == [pytest.approx([98, 97.5, 99]), pytest.approx([79, 85, 95])]
    assert len(second.collections) == 1 and image(figure).std() > 0.01
    assert labels_of(figure) == ["ε = 0.5", "non-private"]


def test_legends_name_nothing_that_is_not_drawn():
    assert labels_of(draw_classes(BY_CLASS, "mnist", 0.5)) == ["ε = 0.5"]
    table = Published("a", "A", (0.5,), {"mnist": {"DPSGD": (93.1,), "DPIS": (None,)}}, {})
    assert labels_of(draw_accuracy([table], [])) == ["DPSGD", "published"]
    table = Published("a", "A", (0.5,), {"mnist": {"DPSGD": (None,)}}, {})
    private = [run for run in RUNS if run["target_epsilon"]]
    assert labels_of(draw_accuracy([table], private)) == ["DPSGD", "ours, ± 1 sd"]
