"""Integrations with Opacus, transformers, TRL and Lightning; each module needs its library."""
