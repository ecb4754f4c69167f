"""Tests that model and loop keep samples apart: they run microbatches with altered samples."""
