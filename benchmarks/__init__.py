"""Measurements: one way of timing, one form of results, one file per benchmark.

`timing` times calls, `memory` measures what they take, `work` counts what they do, `roofline` says
what bounds them, `trace` profiles them. `plan` is what a benchmark is made of, `suite` runs it,
`measuring` checks and times its comparisons, `isolated` in processes of their own and `workers` on
several; `environment` says on what, `progress` how far it is. `results` writes JSON, `document`
the page of it, `legend` what its columns say, `picture` the picture. `suites` lists the
benchmarks, `compare` tells whether one run is slower than another, `versus` runs two checkouts in
turns.
"""
