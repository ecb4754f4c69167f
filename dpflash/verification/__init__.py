"""Checks during training that nothing but released parameters changes; compares tensors."""
