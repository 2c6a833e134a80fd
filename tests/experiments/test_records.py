import fcntl
import math
import threading

import pytest

from experiments import records


def test_what_is_appended_is_read(tmp_path):
    path = tmp_path / "new" / "record.jsonl"
    assert records.read(path) == []
    lines = [{"text": "two\nlines, ε"}, {"number": 0.1 + 0.2, "none": None}]
    for each in lines:
        records.append(path, each)
    assert records.read(path) == lines
    text = path.read_text()
    assert text.count("\n") == 2 and text.endswith("\n")


def test_a_line_that_a_kill_has_cut_is_lost_alone(tmp_path):
    path = tmp_path / "record.jsonl"
    lines = [{"n": i, "text": "x" * 50} for i in range(3)]
    for each in lines:
        records.append(path, each)
    whole = path.read_bytes()
    last = whole[: whole.rfind(b"\n", 0, -1) + 1]
    for length in range(len(last) + 1, len(whole)):
        path.write_bytes(whole[:length])
        assert records.read(path) == lines[:2]
        records.append(path, {"n": 3})
        assert path.read_bytes() == last + b'{"n": 3}\n'


def test_a_first_line_that_a_kill_has_cut_is_lost(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_bytes(b'{"n": ')
    assert records.read(path) == []
    records.append(path, {"n": 1})
    assert path.read_bytes() == b'{"n": 1}\n'


def test_what_is_no_number_in_json_is_not_written(tmp_path):
    records.append(tmp_path / "record.jsonl", {"n": 1})
    with pytest.raises(ValueError):
        records.append(tmp_path / "record.jsonl", {"loss": math.nan})
    records.append(tmp_path / "record.jsonl", {"n": 2})
    assert records.read(tmp_path / "record.jsonl") == [{"n": 1}, {"n": 2}]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_text('{"n": 1}\n{"n": \n{"n": 3}\n')
    with pytest.raises(ValueError, match=r"record\.jsonl, line 2: not a line of JSON"):
        records.read(path)


def test_one_writer_waits_for_another(tmp_path):
    path = tmp_path / "record.jsonl"
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b'{"n": ')
        other.flush()
        writer = threading.Thread(target=records.append, args=(path, {"n": 2}))
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        other.write(b"1}\n")
    writer.join(10)
    assert records.read(path) == [{"n": 1}, {"n": 2}]


def test_no_line_of_many_writers_is_lost(tmp_path):
    path = tmp_path / "record.jsonl"

    def write(writer):
        for n in range(100):
            records.append(path, {"writer": writer, "n": n})

    writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    found = sorted((line["writer"], line["n"]) for line in records.read(path))
    assert found == [(i, n) for i in range(4) for n in range(100)]
