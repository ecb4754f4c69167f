"""The benchmarks of `dpflash bench`: one harness, and a file for each group of suites.

`suite` runs a benchmark. `timing`, `memory` and `work` measure its calls. `output`, `document`
and `picture` write the results. `isolated` starts processes. `suites` lists the benchmarks.
`compare` compares two runs, and `versus` compares two checkouts.
"""

from dpflash._lazy import lazy

__getattr__ = lazy(__name__)
