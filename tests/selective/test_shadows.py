"""What a function that runs on copies leaves behind: nothing, until they are committed."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.base.random import key_streams
from tfdp.training.selective.shadows import Shadows


class Everything:
    """A function that changes a variable in every way that training does."""

    def __init__(self):
        self.weight = tf.Variable([1.0, 2.0])
        self.write_only = tf.Variable(0, dtype=tf.int64)
        self.only_read = tf.Variable(1.0)
        self.kept = tf.Variable(0)
        self.nested = tf.Variable([[1.0]], shape=[None, 1])
        self.table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2.0]), 0.0)
        self.generator = tf.random.Generator.from_seed(3)
        self.stream = key_streams.KeyStream()
        self.inner = tf.function(lambda: self.nested.assign([[2.0], [3.0]]))
        self.function = tf.function(self.change).get_concrete_function()

    def change(self):
        noise = self.generator.normal([2]) * self.table.lookup(tf.constant(1))
        self.weight.scatter_nd_update([[0]], [5.0])
        self.weight.assign_add(self.only_read * noise)
        self.write_only.assign_add(1, read_value=False)
        self.kept.assign_add(1)
        tf.cond(noise[0] < 1e9, self.inner, lambda: self.nested)
        return self.stream.next_key()

    def state(self):
        variables = [self.weight, self.write_only, self.generator.state, self.nested]
        return [variable.numpy() for variable in variables]


def run(everything, keep, kept=None, jit_compile=False, **changes):
    """Runs the function on copies; returns the key that it drew."""
    kept = [everything.kept] if kept is None else kept
    shadows = Shadows(everything.function, kept)

    @tf.function(jit_compile=jit_compile)
    def attempt(keep):
        shadows.reset()
        (key,) = shadows.call(everything.function)
        tf.cond(keep, lambda: shadows.commit(**changes), lambda: None)
        return key

    return attempt(tf.constant(keep)).numpy().tobytes()


def same(a, b):
    return [np.array_equal(x, y) for x, y in zip(a, b, strict=True)]


def check_only_kept_changes():
    everything = Everything()
    before = everything.state()
    keys = {run(everything, keep=False) for _ in range(3)}
    assert all(same(everything.state(), before))
    assert everything.kept.numpy() == 3
    assert len(keys) == 3


def test_nothing_changes_but_what_is_kept_and_keys():
    check_only_kept_changes()


@pytest.mark.parametrize("forgotten", ["weight", "write_only", "generator", "nested"])
def test_forgetting_a_variable_is_caught(forgotten):
    """Mutant: a variable has no copy."""
    everything = Everything()
    variable = getattr(everything, forgotten)
    variable = variable.state if forgotten == "generator" else variable
    before = everything.state()
    run(everything, keep=False, kept=[everything.kept, variable])
    assert sum(same(everything.state(), before)) == 3


def test_setting_keys_back_is_caught(monkeypatch):
    """Mutant: streams of secret keys have copies, so that each attempt gets the same keys."""
    monkeypatch.setattr(key_streams, "all_variables", lambda: [])
    with pytest.raises(AssertionError):
        check_only_kept_changes()


class Compilable(Everything):
    """What XLA can do of it: no tables, and no variables without a shape."""

    def __init__(self):
        super().__init__()
        self.table = self
        self.inner = lambda: self.nested.assign([[2.0]])
        self.function = tf.function(self.change).get_concrete_function()

    def lookup(self, key):
        return 2.0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("cls", "jit_compile"), [(Everything, False), (Compilable, True)])
def test_a_commit_does_what_the_function_does(cls, jit_compile):
    whole, ours = cls(), cls()
    before = whole.state()
    tf.function(lambda: whole.function(), jit_compile=jit_compile)()
    run(ours, keep=True, jit_compile=jit_compile)
    assert all(same(ours.state(), whole.state()))
    assert not any(same(ours.state(), before))


def test_copies_follow_variables_that_others_set():
    everything = Everything()
    shadows = Shadows(everything.function, [everything.kept])

    @tf.function
    def attempt():
        shadows.reset()
        shadows.commit()

    everything.weight.assign([7.0, 8.0])
    attempt()
    assert everything.weight.numpy().tolist() == [7.0, 8.0]


def test_variables_are_left_out_of_a_commit():
    everything = Everything()
    before = everything.state()
    run(everything, keep=True, without=[everything.weight])
    assert same(everything.state(), before) == [True, False, False, False]


def test_the_last_variables_of_a_commit_are_set_after_all_others():
    everything = Everything()
    shadows = Shadows(everything.function)

    @tf.function
    def commit():
        shadows.commit(last=[everything.weight])

    graph = commit.get_concrete_function().graph
    handle = graph.capture(everything.weight.handle)
    writes = [op for op in graph.get_operations() if op.type == "AssignVariableOp"]
    (last,) = [op for op in writes if op.inputs[0] is handle]
    assert len(writes) == 5
    awaited = [*last.control_inputs, *last.inputs[1].op.control_inputs]
    assert all(op in awaited for op in writes if op is not last)


def test_what_is_only_read_has_no_copy():
    everything = Everything()
    shadows = Shadows(everything.function)
    for variable in (everything.only_read, everything.stream.variables[0]):
        assert shadows.handle(variable.handle) is variable.handle
    assert shadows.handle(everything.weight.handle) is not everything.weight.handle


def test_copies_of_copies_change_nothing_else():
    everything = Everything()
    first = Shadows(everything.function, [everything.kept])
    read = tf.function(lambda: everything.weight.assign_add([1.0, 1.0]))
    second = Shadows(read.get_concrete_function(), of=first)

    @tf.function
    def attempt():
        first.reset()
        first.call(everything.function)
        found = []
        for _ in range(2):
            second.reset()
            found += second.call(read.get_concrete_function())
        first.commit()
        return found

    a, b = attempt()
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, everything.weight + 1.0)


def test_state_that_is_no_variable_is_refused():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    @tf.function
    def count():
        table.insert(tf.constant(1, tf.int64), table.lookup(tf.constant(1, tf.int64)) + 1)

    with pytest.raises(ValueError, match=r"LookupTableInsert.* not a variable"):
        Shadows(count.get_concrete_function())
