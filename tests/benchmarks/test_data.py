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
    seconds = [float(line.split("|")[2]) for line in lines[3:]]
    assert all(0 <= one < 60 for one in seconds)
