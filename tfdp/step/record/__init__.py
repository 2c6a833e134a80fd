"""Record of what was released, and of the weights that it reached: counts, tables, copies."""

# TensorFlow comes first: importing it calls a hook that imports `saved_lineage` of this package.
import tensorflow  # noqa: F401

from tfdp.accounting.found_ledger import register_ledger_finder
from tfdp.step.record import record_ledger

register_ledger_finder(record_ledger.ledger_of_model)
