"""Tests of this folder import `oracle` and `unit_oracle`."""

import sys
from pathlib import Path

# As in tests/distributed; never `tests/` itself.
sys.path.insert(0, str(Path(__file__).parent))
