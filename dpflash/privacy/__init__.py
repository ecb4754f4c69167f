"""The privacy spent: spending, budget, ledger, secret keys, random masks and public facts."""
