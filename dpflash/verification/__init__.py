"""Checks that training changes nothing but the released parameters; compares tensors."""
