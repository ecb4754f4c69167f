"""Measurements: one way of timing, one form of results, one file per benchmark.

`timing` times calls, `memory` measures what they take, `work` counts what they do, `roofline` says
what bounds them, `trace` profiles them. `suite` checks and measures what a benchmark compares,
`isolated` in processes of their own and `workers` on several; `environment` says on what.
`results` writes JSON, `document` pages and pictures of it. `suites` lists the benchmarks,
`compare` tells whether one run is slower than another, `versus` runs two checkouts in turns.
"""
