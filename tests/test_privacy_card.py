"""Privacy cards: well-formed, true to the statement, and one file."""

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.accounting import PrivacyLedger, event_codec
from tfdp.accounting.statement import statement_of
from tfdp.privacy_card import facts, html_page, markdown_page

VOID = {"meta", "rect", "line", "circle", "polyline"}


class Checked(HTMLParser):
    """Collects the text of a page; fails where a tag is not closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.texts.append(data)


def ledger(steps=50, notes=()):
    made = PrivacyLedger(notes)
    made.record(event_codec.sampled_gaussian(0.01, 1.0), steps)
    return made


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cards")
    noted = ledger(notes=["<b>Mine</b> & yours"])
    for name in ("card.html", "card.md"):
        tfdp.report(noted, folder / name, delta=1e-5)
    return {one.suffix: one.read_text() for one in folder.iterdir()}


def test_the_page_is_well_formed_and_loads_nothing(pages):
    page = Checked(pages[".html"])
    assert page.tags.count("svg") == 2 and page.tags.count("main") == 1
    assert not {"script", "link", "img", "iframe", "b"} & {*page.tags}
    assert not [value for name, value in page.attributes if name in ("src", "href", "onload")]
    assert "url(" not in pages[".html"] and "@import" not in pages[".html"]


def test_numbers_are_those_of_the_statement(pages):
    statement = statement_of(ledger(), 1e-5)
    stated = statement.to_dict()
    text = "".join(Checked(pages[".html"].replace("<code>", "`").replace("</code>", "`")).texts)
    for page in (text, pages[".md"].replace("\\", "")):
        assert statement.paragraphs[0] in page
        assert f"{stated['epsilon']:g}" in page and f"{stated['epsilon_lower_bound']:g}" in page
        for paragraph in (*statement.paragraphs, *statement.not_covered):
            assert paragraph in page
        assert f"{stated['gaussian_dp']['mu']:g}" in page
        for rate in statement.trade_off.at_usual_rates.values():
            assert f"{np.ceil(rate * 1e4 - 1e-7) / 100:.4g}%" in page
        assert f"tfdp{'|' if '|' in page else ''}" in page.replace(" ", "").replace("\n", "")


def test_pictures_end_at_the_epsilon_of_the_statement():
    made = facts.facts_of(ledger(), statement_of(ledger(), 1e-5))
    epsilon = statement_of(ledger(), 1e-5).to_dict()["epsilon"]
    assert made.by_steps[0] == (0, 0) and made.by_steps[-1] == (50, epsilon)
    assert (1e-5, epsilon) in made.by_delta
    of_half = ledger(25).epsilon(1e-5).epsilon
    assert dict(made.by_steps)[25] == pytest.approx(of_half, rel=1e-5)
    assert [e for _, e in made.by_steps] == sorted(e for _, e in made.by_steps)
    assert [e for _, e in made.by_delta] == sorted((e for _, e in made.by_delta), reverse=True)


def test_notes_and_names_are_escaped(pages):
    assert "<b>" not in pages[".html"] and "&lt;b&gt;Mine&lt;/b&gt; &amp; yours" in pages[".html"]
    assert "- &lt;b&gt;Mine" in pages[".md"]
    named = facts.Facts(
        "<script>alert(1)</script>|x",
        statement_of(ledger(), 1e-5),
        (("a|b", "<i>"),),
        (),
        (),
        (),
        "",
    )
    page = html_page.page(named)
    assert "script" not in Checked(page).tags and "i" not in Checked(page).tags
    text = markdown_page.page(named)
    assert "\\<script\\>" in text and "| a\\|b | \\<i\\> |" in text


def test_pictures_of_markdown_are_inside_it(pages):
    images = re.findall(r"!\[.*?\]\((.*?)\)", pages[".md"])
    assert len(images) == 2
    for image in images:
        kind, _, data = image.partition(";base64,")
        assert kind == "data:image/svg+xml"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")


def test_the_hash_is_that_of_the_weights(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=[3])])
    weights = model.get_weights()
    first = facts.weights_hash(weights)
    assert facts.weights_hash([array.copy() for array in weights]) == first
    moved = [weights[0], weights[1] + np.float32(1e-7)]
    transposed = [weights[0].T, weights[1]]
    others = (moved, transposed, weights[::-1], [weights[0].astype("float64"), weights[1]])
    hashes = {facts.weights_hash(other) for other in others}
    assert len(hashes) == 4 and first not in hashes
    big_endian = [array.astype(">f4") for array in weights]
    assert facts.weights_hash(big_endian) == first


def test_a_model_with_an_optimizer_that_has_not_trained(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=[3])], name="mine")
    batches = tfdp.data.poisson_batches((np.ones([300, 3]), np.ones(300)), expected_batch_size=30)
    model.compile(tfdp.DPSGD(1.0, 1.1, sampling=batches.sampling), "mse")
    tfdp.report(model, tmp_path / "card.HTML")
    text = "\n".join(Checked((tmp_path / "card.HTML").read_text()).texts)
    assert "Privacy card: mine" in text and "Released: nothing yet" in text
    assert facts.weights_hash(model.get_weights()) in text
    for value in ("DPSGD", "300", "at delta = 0.0018", "expected batch size"):
        assert value in text


def test_no_guarantee_has_no_pictures(tmp_path):
    nothing = PrivacyLedger()
    nothing.record(event_codec.sampled_gaussian(0.01, 0.0))
    tfdp.report(nothing, tmp_path / "card.html", delta=1e-5)
    page = Checked((tmp_path / "card.html").read_text())
    text = "\n".join(page.texts)
    assert "No differential privacy" in text and "svg" not in page.tags and "100%" in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": "card.pdf", "delta": 1e-5}, ValueError, "Argument `path` must be a file"),
        ({}, ValueError, "Argument `delta` must be given"),
        ({"delta": 1.0}, ValueError, r"Argument `delta` must be in \(0, 1\)"),
        ({"model": "x", "delta": 1e-5}, TypeError, "Argument `ledger` must be a PrivacyLedger"),
    ],
)
def test_wrong_arguments(arguments, error, message, tmp_path):
    given = {"model": ledger(), "path": "card.html", **arguments}
    with pytest.raises(error, match=message):
        tfdp.report(given.pop("model"), tmp_path / given.pop("path"), **given)
    assert not [*tmp_path.iterdir()]


def test_mutant_that_counts_all_steps_at_each_point_is_caught(monkeypatch):
    monkeypatch.setattr(facts, "_first", lambda releases, steps: iter(releases))
    made = facts.facts_of(ledger(), statement_of(ledger(), 1e-5))
    assert dict(made.by_steps)[25] > 1.05 * ledger(25).epsilon(1e-5).epsilon
