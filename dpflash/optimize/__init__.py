"""Optimization levels: autocast, torch.compile, and the wrapper around the model's forward."""
