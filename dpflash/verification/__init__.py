"""Proves during training that a model keeps its samples apart and changes nothing else."""
