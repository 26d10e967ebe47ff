"""The job table's history: one reversible step a file, in versions/. Run by `headrace.ledger.migrate`."""
