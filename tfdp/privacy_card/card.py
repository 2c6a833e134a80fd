"""A page about the privacy of a model, as one file."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdp.accounting.budget import default_delta
from tfdp.accounting.found_ledger import find_ledger
from tfdp.accounting.ledger import Ledgers, as_ledgers, compose_ledgers
from tfdp.accounting.statement import statement_of
from tfdp.base import validation
from tfdp.base.whole_files import write_text
from tfdp.privacy_card import html_page, markdown_page
from tfdp.privacy_card.facts import Facts, facts_of

_WRITERS: dict[str, Callable[[Facts], str]] = {
    ".html": html_page.page,
    ".htm": html_page.page,
    ".md": markdown_page.page,
    ".markdown": markdown_page.page,
}


def report(
    model: Any,
    path: str | os.PathLike,
    *,
    delta: float | None = None,
    prior: Ledgers | None = None,
) -> None:
    """Writes a privacy card: one page that can be published with a model.

    It holds the privacy statement, the parameters, epsilon against delta and against steps as
    pictures and tables, what an attacker can reach, what is not covered, versions, and a hash of
    the weights. It is one file, which loads nothing from elsewhere. Nothing in it follows from the
    training data but what was released.

    Args:
      model: A Keras model, an optimizer with a `ledger`, or a `PrivacyLedger`; as for
        `privacy_statement`.
      path: The file, which is overwritten. Its suffix decides: `.html`, or `.md` for Markdown.
      delta: The delta of the guarantee, in (0, 1). None: N^-1.1, rounded down to two digits, of the
        number of examples that the optimizers were given.
      prior: Other releases about the same examples; as for `privacy_statement`.

    Raises:
      TypeError: There is no ledger in `model`.
      ValueError: Another argument is out of its range, or `delta` must be given.
      dp_accounting.UnsupportedEventError: No accountant supports what was released.

    Example:
      >>> import tempfile
      >>> import dp_accounting
      >>> from tfdp.accounting import PrivacyLedger
      >>> ledger = PrivacyLedger()
      >>> ledger.record(
      ...     dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 1000)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     report(ledger, f"{folder}/card.md", delta=1e-5)
      ...     print(Path(folder, "card.md").read_text().splitlines()[0])
      # Privacy card
    """
    path = Path(validation.path("path", path))
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise validation.error("path", f"a file that ends in one of {list(_WRITERS)}", str(path))
    if delta is None:
        ledger = compose_ledgers([find_ledger(model), *as_ledgers(prior)])
        if not ledger.dataset_sizes:
            raise ValueError(
                "Argument `delta` must be given: the ledger does not say how many examples there "
                "were. Received: delta=None."
            )
        delta = default_delta(max(ledger.dataset_sizes))
    text = writer(facts_of(model, statement_of(model, delta, prior=prior)))
    write_text(path, text)
