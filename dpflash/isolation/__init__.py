"""Shows that model and loop keep samples apart: microbatches are run with others altered."""
