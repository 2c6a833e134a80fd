"""Line charts as SVG: well-formed, in order, and without anything from outside."""

from xml.etree import ElementTree

import pytest

from tfdp.base.svg import line_chart

NAMES = {"x_label": "x", "y_label": "y & z"}
SPACE = "{http://www.w3.org/2000/svg}"


def circles(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SPACE}svg"
    return [(float(one.get("cx")), float(one.get("cy"))) for one in root.iter(f"{SPACE}circle")]


def test_points_are_where_they_should_be():
    places = circles(line_chart([(1, 4.0), (10, 2.0), (100, 0.0)], title="t", x_log=True, **NAMES))
    (left, top), (middle, half), (right, bottom) = places
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert half == pytest.approx((top + bottom) / 2, abs=0.1)
    assert left < right and top < bottom  # The y axis of SVG points down.
    linear = circles(line_chart([(1, 4.0), (10, 2.0), (100, 0.0)], title="t", **NAMES))
    assert linear[1][0] < middle


def test_names_are_escaped():
    svg = line_chart([(1, 2.0)], title="</svg><script>alert(1)</script>", **NAMES)
    circles(svg)
    assert "<script" not in svg and "y &amp; z" in svg


@pytest.mark.parametrize("points", [[], [(1, float("inf"))], [(float("nan"), 1.0)]], ids=str)
def test_points_without_a_place_are_refused(points):
    with pytest.raises(ValueError, match="Argument `points` must be finite, and not empty"):
        line_chart(points, title="t", **NAMES)


@pytest.mark.parametrize("most", [1e-9, 0.003, 0.99, 1.0, 7.0, 12.5, 1e6, 0.0])
def test_the_axis_holds_all_points(most):
    ((_, y),) = circles(line_chart([(5, most)], title="t", **NAMES))
    assert 30 <= y <= 260
