"""Reads and writes checkpoints: one file (`state`), or a folder of several ranks (`sharded`)."""
