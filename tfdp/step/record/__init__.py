"""Record of what was released, and of the weights that it reached: counts, tables, copies."""

import tensorflow  # noqa: F401  # First: its hook imports `saved_lineage`, which `lineage` would wait for.

from tfdp.accounting.found_ledger import register_ledger_finder
from tfdp.step.record import record_ledger

register_ledger_finder(record_ledger.ledger_of_model)
