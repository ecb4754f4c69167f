"""Privacy accounting of a run (spending, budget, ledger), its secret keys, and public facts."""
