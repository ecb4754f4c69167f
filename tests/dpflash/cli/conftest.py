"""What tests of the command line share."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is drawn."""
    drawn, plain = [], Figure.__init__

    def keep(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        drawn.append(self)

    monkeypatch.setattr(Figure, "__init__", keep)
    return drawn
