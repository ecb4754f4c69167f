"""Integrations with Opacus and transformers. Each module imports its library when it is called."""
