import pytest

from benchmarks.fine_tuning import Cost
from tests.front_ends import needs_keras_3

pytestmark = needs_keras_3


def test_a_row_shows_ratios():
    from benchmarks import adapters

    turns = [(Cost(0.1, 0.2), Cost(0.15, 0.4)), (Cost(0.1, 0.2), Cost(0.2, 0.5))] * 3
    assert adapters.row("head", 1234, turns) == "| head | 1,234 | 100 / 175 | 1.75 (2.25) |"


@pytest.mark.slow
def test_all_parts_are_measured(capsys):
    from benchmarks import adapters

    adapters.main(["--width", "8", "--rank", "2", "--batch", "4", "--repeats", "1"])
    rows = capsys.readouterr().out.splitlines()[4:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == list(adapters.PARTS)
    head, adapted, whole = (int(row[1].replace(",", "")) for row in cells)
    assert head == 8 * 10 + 10
    # Factors and biases of queries and values, [8, 4, 2], and of dense kernels, [8, 32], [32, 8].
    factors = 2 * (8 * 4 * 2 + 2 * 2) + 2 * (8 + 32) * 2
    biases = 2 * 8 + 32 + 8
    assert adapted == head + 2 * (factors + biases) < whole


def test_bad_numbers_are_errors(capsys):
    from benchmarks import adapters

    with pytest.raises(SystemExit):
        adapters.main(["--width", "6"])
    assert "--width must be a multiple of 4" in capsys.readouterr().err
