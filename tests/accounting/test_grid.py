"""Every accountant against the table of truths, and peers where they leave it."""

import json
import math
import os

import dp_accounting
import numpy as np
import pytest
from opacus.accountants import RDPAccountant as OpacusRDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp as opacus_compute_rdp
from oracle import TRUTH, name, phases_of

from dpflash.accounting import (
    ContourAccountant,
    PLDAccountant,
    RDPAccountant,
    compute_rdp,
)

FULL = os.environ.get("DPFLASH_FULL") == "1"
ROWS = json.loads(TRUTH.read_text())
ROUNDING = 4e-15  # of an epsilon as float64

# (noise, rate, steps) of rows at which PLD's get_delta is more than 1% above the delta whose
# epsilon it was given, and how many times delta it is. Bounds all the same, but loose: delta has
# a grid of its own, which is aimed at epsilon's digits.
PLD_LOOSE_DELTAS = {
    (0.5, 1e-6, 1): 7e5,
    (0.5, 1e-6, 100): 4,
    (1, 1e-6, 1000): 1.02,
    (0.8, 1e-5, 2): 3,
    (0.5, 0.1, 1_000_000): 1e6,
}


def asked(kind, history):
    accountant = kind()
    accountant.history = history
    return accountant


def truth_of(row):
    """Epsilon, and by how much the row may be wrong."""
    epsilon = float(row["epsilon"])
    return epsilon, epsilon * (2 * 10.0 ** -row["digits"] + ROUNDING)


rows = pytest.mark.parametrize("row", ROWS, ids=name)


def test_the_table_is_all_there():
    assert len(ROWS) >= 102
    assert sum("phases" in row for row in ROWS) >= 6
    settings = [tuple(phases_of(row)[0]) for row in ROWS]
    assert set(PLD_LOOSE_DELTAS) <= set(settings)


@rows
def test_contour_holds_the_truth_to_a_millionth(row):
    truth, digit = truth_of(row)
    accountant = asked(ContourAccountant, phases_of(row))
    lower, upper = accountant.get_epsilon(row["delta"], interval=True)
    assert 0 <= lower <= truth + digit
    assert truth - digit <= upper <= truth * (1 + 1e-6) + digit
    assert lower >= truth * (1 - 1e-6) - digit
    assert accountant.get_epsilon(row["delta"]) == upper
    assert accountant.get_delta(upper) <= row["delta"] * (1 + 1e-6)


@rows
def test_contour_has_the_tables_delta_at_the_truth(row):
    truth, _ = truth_of(row)
    lower, upper = asked(ContourAccountant, phases_of(row)).get_delta(truth, interval=True)
    if truth:
        # The last digit of epsilon is some of delta.
        slack = 1e-9 + 40 * truth * 10.0 ** -row["digits"]
        assert lower <= row["delta"] * (1 + slack)
        assert row["delta"] * (1 - slack) <= upper <= row["delta"] * (1 + 1e-5)
    else:
        assert 0 < lower <= upper <= row["delta"]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if FULL or row.get("steps") == 1000], ids=name
)
def test_pld_holds_the_truth_to_a_thousandth(row):
    truth, digit = truth_of(row)
    accountant = asked(PLDAccountant, phases_of(row))
    lower, upper = accountant.get_epsilon(row["delta"], interval=True)
    assert 0 <= lower <= truth + digit
    assert truth - digit <= upper <= truth * (1 + 1e-3) + digit
    assert lower >= truth * (1 - 5e-3) - digit
    below, above = accountant.get_delta(upper, interval=True)
    assert below <= row["delta"] * (1 + 1e-9)
    loose = PLD_LOOSE_DELTAS.get(phases_of(row)[0] if "phases" not in row else None, 1.01)
    assert above <= row["delta"] * loose


@pytest.mark.filterwarnings("ignore:Optimal order is the")
@rows
def test_rdp_is_above_the_truth(row):
    truth, digit = truth_of(row)
    accountant = asked(RDPAccountant, phases_of(row))
    upper = accountant.get_epsilon(row["delta"])
    assert truth - digit <= upper < math.inf
    assert accountant.get_delta(upper) <= row["delta"] * (1 + 1e-6)
    contour = asked(ContourAccountant, phases_of(row)).get_epsilon(row["delta"])
    peer = asked(OpacusRDPAccountant, phases_of(row)).get_epsilon(row["delta"])
    assert contour <= upper * (1 + 1e-9) and upper <= peer * (1 + 1e-8)


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("rate", [1e-3, 0.02, 0.4, 1.0])
def test_rdp_at_whole_orders_is_that_of_both_peers(noise, rate):
    orders = [2, 3, 4, 8, 16, 32, 64, 128]
    ours = compute_rdp(noise_multiplier=noise, sample_rate=rate, orders=orders)
    opacus = opacus_compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    google = dp_accounting.rdp.RdpAccountant(orders).compose(event)
    # Both sum A = exp((order - 1) rdp) itself, and know no more of it than its rounding.
    slack = 1e-9 * ours + 1e-13 / (np.array(orders) - 1)
    assert np.all(np.abs(ours - opacus) <= slack)
    assert np.all(np.abs(ours - google._rdp) <= slack)
