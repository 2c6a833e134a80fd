"""What was released, and which weights it reached: counts, their records, and copies of weights."""

from tfdp.accounting.statement import register_ledger_finder
from tfdp.step.record import record_ledger

register_ledger_finder(record_ledger.ledger_of_model)
