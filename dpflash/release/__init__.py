"""Trained models outside of their runs: loading, evaluation, generation, export."""
