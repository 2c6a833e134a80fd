import importlib.util
import json
import re

import numpy as np
import pytest

from benchmarks import export_xla, run_xla
from benchmarks.problems import problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("programs")
    export_xla.main(["--model", "mnist_cnn", "--batch", "4", "--output_dir", str(path)])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "private"])
def test_program_has_a_parameter_for_each_array(folder, name):
    text = (folder / f"{name}.stablehlo").read_text()
    stored = np.load(folder / f"{name}_args.npz")
    arrays = [stored[f"a{i}"] for i in range(len(stored.files))]
    assert re.match(r"(#loc.*\n)*module @\w+", text) and text.count("{") == text.count("}")
    assert text.count("@main") == 1 and "stablehlo.convolution" in text
    found = export_xla.parameters(text)
    assert found == [(array.shape, array.dtype.name) for array in arrays]
    x, y = problem("mnist_cnn").rows(4)
    np.testing.assert_array_equal(arrays[0], x)
    np.testing.assert_array_equal(arrays[1], y)
    weights = sum(array.size for array in arrays[2:] if array.ndim and array.dtype == np.float32)
    assert weights == problem("mnist_cnn").parameters


@pytest.mark.slow
def test_private_program_draws_noise_and_updates_more_than_the_plain_one(folder):
    plain, private = ((folder / f"{name}.stablehlo").read_text() for name in ("plain", "private"))
    # The rotations of ChaCha20.
    assert "shift_right_logical" in private and "shift_right_logical" not in plain
    assert len(export_xla.parameters(private)) > len(export_xla.parameters(plain))


def test_parameters_are_read_from_the_text():
    text = """module @m {
  func.func @main(%arg0: tensor<8x28x1xf32> loc("a"), %arg1: tensor<i64>, %arg2: tensor<2xi1>) \
-> (tensor<3xf32>) {"""
    assert export_xla.parameters(text) == [((8, 28, 1), "float32"), ((), "int64"), ((2,), "bool")]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_programs_run_by_jax(folder, capsys):
    run_xla.main(["--folder", str(folder), "--seconds", "0"])
    plain, private = map(json.loads, capsys.readouterr().out.splitlines())
    assert plain["program"] == "plain" and private["program"] == "private"
    for line in (plain, private):
        assert line["step_ms"] > 0 and 1 < line["loss"] < 4
