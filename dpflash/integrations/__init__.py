"""Integrations with Opacus, transformers, TRL and Lightning, whose modules need these libraries."""
