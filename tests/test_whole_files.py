"""Files that are there with all that they hold, or not at all."""

import pytest

from tfdp.base.whole_files import whole_file


def test_a_file_is_there_once_it_is_written(tmp_path):
    path = tmp_path / "a.txt"
    with whole_file(path) as unfinished:
        unfinished.write_text("new")
        assert not path.exists() and unfinished.suffix == ".txt"
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_what_was_there_stays_if_writing_fails(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="disk"), whole_file(path) as unfinished:
        unfinished.write_text("ne")
        raise OSError("disk")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]
