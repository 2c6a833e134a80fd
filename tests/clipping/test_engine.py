import math

import pytest

from tfdp.clipping import VectorizedEngine


@pytest.mark.parametrize(
    ("num_microbatches", "relation", "factor"),
    [
        (None, "zero_out", 1),
        (None, "add_or_remove_one", 1),
        (None, "replace_one", 2),
        (4, "zero_out", 2),
        (4, "add_or_remove_one", 2),
        (4, "replace_one", 2),
    ],
)
def test_sensitivity(num_microbatches, relation, factor):
    engine = VectorizedEngine(0.5, num_microbatches)
    assert engine.sensitivity(relation) == 0.5 * factor


def test_zero_out_is_the_default():
    engine = VectorizedEngine(0.5, 4)
    assert engine.sensitivity() == engine.sensitivity("zero_out") == 1.0


def test_relation_is_checked():
    with pytest.raises(ValueError, match=r"`relation` must be .*Received: relation='swap'"):
        VectorizedEngine(1.0).sensitivity("swap")


def test_infinite_clip_has_infinite_sensitivity():
    engine = VectorizedEngine(math.inf)
    assert not engine.clips
    assert math.isinf(engine.sensitivity())
