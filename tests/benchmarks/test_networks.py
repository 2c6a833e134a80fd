import importlib.util
import math

import numpy as np
import pytest

from benchmarks import networks
from benchmarks.problems import PROBLEMS, mlp_parameters, mlp_width, problem
from experiments.front_ends import front_end
from tests.front_ends import needs_keras_3


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", [*PROBLEMS, "mlp_7"])
@pytest.mark.parametrize("version", [2, pytest.param(3, marks=needs_keras_3)])
def test_network_has_the_stated_shapes_and_parameters(version, name):
    p, keras = problem(name), front_end(version).keras
    model = networks.build(p, keras)
    assert isinstance(model, keras.Model)
    assert model.count_params() == p.parameters
    assert model.input_shape == (None, *p.input_shape)
    assert model.output_shape == (None, p.classes)
    x, y = p.rows(5)
    assert model(x).shape == (5, p.classes)
    assert x.dtype == p.dtype and y.dtype == np.int64 and set(y) <= set(range(p.classes))


@pytest.mark.parametrize("name", [*PROBLEMS, "mlp_70"])
def test_largest_activation_is_that_of_a_layer(name):
    layers = networks.build(problem(name)).layers
    shapes = [layer.output_shape[1:] for layer in layers if type(layer).__name__ != "InputLayer"]
    assert problem(name).largest_activation == max(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize("parameters", [1e3, 1e4, 1e6, 1e7])
def test_width_gives_about_the_parameters_asked_for(parameters):
    assert mlp_parameters(mlp_width(round(parameters))) == pytest.approx(parameters, rel=0.05)


def test_unknown_problem_is_refused():
    with pytest.raises(ValueError, match="'svhn'"):
        problem("svhn")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", PROBLEMS)
def test_pytorch_network_has_as_many_parameters(name):
    from benchmarks import torch_steps

    network = torch_steps.build(problem(name), private=False)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert trained == problem(name).parameters


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
@pytest.mark.parametrize("name", PROBLEMS)
def test_jax_network_has_as_many_parameters(name):
    import jax

    from benchmarks import jax_steps

    parameters, _ = jax_steps.build(problem(name))
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == problem(name).parameters
