import pytest

from benchmarks.fine_tuning import Cost
from tests.front_ends import needs_keras_3

pytestmark = needs_keras_3


def test_a_row_shows_ratios():
    from benchmarks import tied_embeddings

    plain = ([Cost(0.1, 0.2)] * 3, 1000.0)
    how = "gather and matmul, norms by Gram matrices"
    row = tied_embeddings.row("private", [Cost(0.15, 0.4)] * 3, 1500.0, how, plain)
    assert row == "| private | norms by Gram matrices | 150 | 1.50 (2.00) | 1,500 | 1.50 |"


@pytest.mark.slow
def test_both_forms_are_measured(capsys):
    from benchmarks import tied_embeddings

    sizes = ["--vocabulary", "50", "--width", "8", "--tokens", "4", "--batch", "2"]
    tied_embeddings.main([*sizes, "--repeats", "1", "--step", "private,instantiated"])
    rows = capsys.readouterr().out.splitlines()[4:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:2] for row in cells] == [
        ["plain", ""],
        ["private", "norms by Gram matrices"],
        ["instantiated", "instantiated"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "All numbers must be positive"),
        (["--step", "other"], "--step must be of"),
    ],
)
def test_bad_arguments_are_errors(arguments, message, capsys):
    from benchmarks import tied_embeddings

    with pytest.raises(SystemExit):
        tied_embeddings.main(arguments)
    assert message in capsys.readouterr().err
