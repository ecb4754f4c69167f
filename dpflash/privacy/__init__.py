"""What a run has spent and may spend: ledger, budget, keys and neighbouring relations."""
