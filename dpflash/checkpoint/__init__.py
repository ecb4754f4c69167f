"""Checkpoints: one file, or a folder that ranks write together."""
