"""The privacy spent and its limits: spending, ledger, budget and secret keys."""
