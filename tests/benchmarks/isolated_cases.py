"""What `test_isolated.py` runs in processes of their own, which import it."""

import io
from multiprocessing import resource_tracker

from tqdm import tqdm

from dpflash.bench.isolated import tell


def registered_with_a_bar():
    """What the system would have to clean up after this process."""
    names = []
    resource_tracker.register = lambda name, kind: names.append(kind)
    for _ in tqdm(range(1), file=io.StringIO()):
        pass
    return names


def told_and_done():
    tell("something")
    return "done"
