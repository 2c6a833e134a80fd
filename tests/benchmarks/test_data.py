"""The benchmark of batches from memory and from disk."""

from benchmarks import data


def test_what_the_first_iteration_takes_is_printed(capsys):
    data.print_first_start(mebibytes=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "the data",
        "`poisson_batches`",
        "the first batch",
        "the first batch of a second iteration",
    ]
    numbers = [float(n) for line in lines[3:] for n in line.split("|")[2:4]]
    assert len(numbers) == 6 and numbers[0] >= 0
