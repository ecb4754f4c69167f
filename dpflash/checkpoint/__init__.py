"""Checkpoints: one file (`state`), or a folder that ranks write together (`sharded`)."""
