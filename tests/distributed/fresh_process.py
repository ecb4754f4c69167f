"""Processes that are forked from one which has imported torch and dpflash, and nothing else."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

FORKED = multiprocessing.get_context("forkserver")
# `import dpflash` alone imports nothing, and an optimizer imports torch._dynamo. The benchmarks'
# processes are copies of the same server, whichever test starts it.
FORKED.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "scipy.stats"]
    + ["scipy.signal", "matplotlib.figure", "matplotlib.backends.backend_agg"]
    + ["dpflash.train.run", "dpflash.bench.scaling_tasks"]
)


def run_script(script: str, folder: Path, environment: Mapping[str, str], errors: Path) -> None:
    """Run a script as the main module; where it fails, `errors` has the traceback."""
    os.chdir(folder)
    os.environ.update(environment)
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except BaseException:
        errors.write_text(traceback.format_exc())
        sys.exit(1)


def run_command(words: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """`dpflash` with its arguments; `output` has what it prints."""
    from dpflash.cli import main

    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.exit(main(list(words)))
