"""The page of the manual shows what the commands print.

`python -m tests.command_line.test_page --write` writes it.
"""

import contextlib
import io
import pathlib
import re
import shlex
import sys

from tfdp.command_line import commands
from tfdp.command_line.main import run

PAGE = pathlib.Path(__file__).parents[2] / "docs/command_line.md"


def printed(line):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        run(commands.tfdp, shlex.split(line)[1:])
    return output.getvalue()


def written(text):
    """Returns the page, with the output of the commands that begin with `$`."""
    block = r"```console\n\$ (.*)\n[^`]*```"
    return re.sub(block, lambda m: f"```console\n$ {m[1]}\n{printed(m[1])}```", text)


def test_the_page_shows_what_is_printed():
    page = PAGE.read_text()
    assert page.count("```console\n$ ") == 4
    assert written(page) == page


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    PAGE.write_text(written(PAGE.read_text()))
