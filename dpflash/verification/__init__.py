"""Checks during training that nothing but released parameters changes, and compares tensors."""
