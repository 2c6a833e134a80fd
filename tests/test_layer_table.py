"""Every layer of `tf.keras.layers` is trained, or refused with a reason, as docs/layers.md says."""

import pytest
import tensorflow as tf

from tests import layer_table
from tests.layer_cases import CASES, Case


def test_every_public_layer_has_a_case():
    assert layer_table.without_case() == []


@pytest.mark.slow
def test_no_layer_fails_and_the_page_says_what_happens():
    found = layer_table.results()
    defects = {name: r.why for name, r in found.items() if r.engine == layer_table.DEFECT}
    assert not defects
    assert layer_table.page(found) == layer_table.PAGE.read_text(), (
        "docs/layers.md is out of date: run `python -m tests.layer_table --write`"
    )


def test_a_layer_that_fails_is_a_defect():
    words = CASES["StringLookup"].x
    case = Case(words, lambda: tf.keras.layers.Lambda(tf.strings.to_number))
    assert layer_table.train_one_step([case]).engine == layer_table.DEFECT


def test_a_layer_that_mixes_examples_is_refused():
    case = Case(
        CASES["Dense"].x,
        lambda: tf.keras.layers.Lambda(lambda t: t - tf.reduce_mean(t, 0)),
    )
    result = layer_table.train_one_step([case])
    assert result.engine == layer_table.REFUSED and "mixes examples" in result.why


def test_reasons_do_not_name_operations():
    reason = "that all are slow: 'model_3/where_1' (Where): no rule says what it does."
    assert layer_table._reason(reason) == "no rule says what it does (`Where`)"
