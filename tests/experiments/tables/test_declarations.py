"""The committed file of tables says what the papers print, and can be run."""

import itertools

import pytest

from experiments import datasets
from experiments.tables import grid
from tests.experiments.jobs_support import line

# The tables of the repository. Numbers are copied from the papers by hand.

BOTTLENECKED = {
    "bottlenecked_3": {
        "mnist": {"DPSGD": (93.1, 94.9, 96.1), "DPSignSGD": (94.8, 95.8, 96.7)},
        "fashion_mnist": {"DPSGD": (78.4, 80.8, 82.3), "DPSignSGD": (79.0, 82.1, 84.5)},
        "imdb_reviews": {"DPSGD": (56.4, 60.3, 63.5), "DPSignSGD": (60.9, 65.0, 67.1)},
    },
    "bottlenecked_4": {
        "mnist": {"DPSGD-TS": (96.0, 96.8, 97.7), "DPSignSGD-TS": (96.2, 97.2, 97.9)},
        "fashion_mnist": {"DPSGD-TS": (79.1, 82.6, 84.5), "DPSignSGD-TS": (80.0, 83.2, 84.7)},
        "imdb_reviews": {"DPSGD-TS": (57.5, 60.3, 62.8), "DPSignSGD-TS": (63.0, 68.1, 69.1)},
    },
    "bottlenecked_5": {
        "mnist": {"DPSGD-HF": (96.1, 97.2, 98.3), "DPSignSGD-HF": (96.8, 97.7, 98.4)},
        "fashion_mnist": {"DPSGD-HF": (83.9, 86.0, 87.8), "DPSignSGD-HF": (85.2, 86.9, 88.2)},
    },
}
DPSUR = {
    "mnist": {
        "DPSUR": (97.93, 98.70, 98.88, 98.95),
        "DPIS": (97.79, 98.51, 98.62, 98.78),
        "DPSGD-HF": (97.78, 98.39, 98.32, 98.56),
        "DPSGD-TS": (97.06, 97.87, 98.22, 98.51),
        "DPAGD": (95.91, 97.30, 97.52, 97.83),
        "DPSGD": (95.11, 96.10, 96.82, 97.25),
    },
    "fashion_mnist": {
        "DPSUR": (88.38, 89.34, 89.71, 90.18),
        "DPIS": (86.25, 88.24, 88.82, 89.21),
        "DPSGD-HF": (85.54, 87.96, 89.01, 89.06),
        "DPSGD-TS": (83.63, 85.33, 86.29, 86.86),
        "DPAGD": (81.26, 84.50, 86.04, 86.78),
        "DPSGD": (80.25, 82.63, 84.72, 85.40),
    },
    "cifar10": {
        "DPSUR": (64.41, 69.40, 70.83, 71.45),
        "DPIS": (63.23, 67.94, 69.63, 70.55),
        "DPSGD-HF": (63.15, 66.55, 69.35, 70.28),
        "DPSGD-TS": (51.52, 56.78, 60.42, 61.75),
        "DPAGD": (45.78, 53.30, 56.21, 60.31),
        "DPSGD": (46.03, 51.33, 54.67, 58.89),
    },
    "imdb_reviews": {
        "DPSUR": (66.50, 71.02, 72.16, 74.14),
        "DPIS": (63.56, 66.11, 68.49, 70.12),
        "DPSGD-TS": (65.08, 68.34, 70.10, 70.85),
        "DPAGD": (58.72, 63.48, 64.59, 66.01),
        "DPSGD": (64.13, 68.55, 70.41, 71.57),
    },
}


@pytest.fixture(scope="module")
def committed():
    return grid.Grid()


def papers_name(row):
    """Rows on IMDB are called by their optimizer here."""
    return row.replace("-Adam", "").replace("Adam", "SGD")


def test_published_numbers_are_those_of_the_papers(committed):
    published = {
        name: {
            dataset: {papers_name(row): numbers for row, numbers in rows.items()}
            for dataset, rows in table.accuracy.items()
        }
        for name, table in committed.tables.items()
    }
    assert published == {**BOTTLENECKED, "dpsur_2": DPSUR}
    for name in BOTTLENECKED:
        table = committed.tables[name]
        assert table.epsilons == (0.5, 1.0, 2.0)
        non_private = {"mnist": 99.1, "fashion_mnist": 90.9, "imdb_reviews": 79.5}
        assert table.non_private == {data: non_private[data] for data in table.accuracy}
    assert committed.tables["dpsur_2"].epsilons == (1.0, 2.0, 3.0, 4.0)
    non_private = {"mnist": 99.11, "fashion_mnist": 90.98, "cifar10": 71.12, "imdb_reviews": 79.97}
    assert committed.tables["dpsur_2"].non_private == non_private


def test_every_cell_of_the_tables_can_be_trained(committed):
    """Its settings are valid on the command line; `Grid` has seen to those of the searches."""
    searched = [line(job, 0.5) for job in committed.trials([], [], [])]
    for table in committed.tables.values():
        for dataset, rows in table.accuracy.items():
            for row, epsilon in itertools.product(rows, table.epsilons):
                if row in committed.rows:
                    (job,) = committed.cell(dataset, row, epsilon, 1, searched)
                    assert job.settings.private and job.settings.target_epsilon == epsilon
                    assert job.settings.delta == 1e-5
                    (other,) = committed.cell(
                        dataset, committed.counterparts[row], None, 1, searched
                    )
                    assert not other.settings.private
                    assert other.settings.features == job.settings.features


def test_rows_of_a_table_are_tuned_alike(committed):
    """As many trials for the baseline as for the method, or no comparison is fair.

    Rows on features choose a network for them, too: the others have none to choose.
    """
    for table in committed.tables.values():
        for (dataset, rows), epsilon in itertools.product(table.accuracy.items(), table.epsilons):
            effort = {}
            for row in rows:
                row = committed._searched_as.get(row, row)
                if row in committed.rows:
                    trials = committed.ranking(dataset, row, epsilon, [])
                    features = trials[0][1].get("features")
                    effort.setdefault(features, {})[row] = len(trials)
            for same in effort.values():
                assert len(set(same.values())) == 1, (table.name, dataset, epsilon, same)


def test_data_sets_of_the_searches_are_known(committed):
    assert {job.dataset for job in committed.trials([], [], [])} <= set(datasets.DATASETS)
