"""Tests that model and loop keep samples apart: runs microbatches with some samples altered."""
