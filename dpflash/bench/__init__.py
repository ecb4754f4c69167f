"""Measurements: one way of timing, one form of results, one file per benchmark.

`timing` times calls, `memory` measures what they take, `workers` runs them on several processes,
`environment` says on what, `results` writes JSON, Markdown and a picture.
"""
