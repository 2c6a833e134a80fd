"""Entropy that is the same in every run of a test; `tests/conftest.py` installs it."""

import contextlib
import hashlib
import itertools
import os
import sys


class RepeatableEntropy:
    """A stand-in for `os.urandom`, of which tfdp gets numbers that follow from a name.

    Other callers and forked processes get what they would without it.
    """

    def __init__(self, real):
        self._real = real
        self.restart("collection")

    def restart(self, name):
        """Makes what follows a function of `name`."""
        self._name, self._process, self._draws = name, os.getpid(), itertools.count()

    @contextlib.contextmanager
    def named(self, name):
        """Makes what is drawn within a function of `name`, and goes on afterwards as before."""
        before = self._name, self._process, self._draws
        self.restart(name)
        try:
            yield
        finally:
            self._name, self._process, self._draws = before

    def __call__(self, size):
        package = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        if package != "tfdp" or os.getpid() != self._process:
            return self._real(size)
        return hashlib.shake_256(f"{self._name} {next(self._draws)}".encode()).digest(size)
