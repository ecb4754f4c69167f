"""Checks of an audit that need two ranks, on the library as it is and with seeded bugs."""

from pathlib import Path

import numpy as np
import pytest

from dpflash.audit.ranks import Audited, RankFailure, RankFindings, RankProbes
from dpflash.audit.run import auditable, rank_checks
from dpflash.config import PerformanceConfig, PrivacyConfig
from dpflash.engine import PrivacyEngine

CASES = str(Path(__file__).with_name("audit_cases.py"))
PRIVACY = PrivacyConfig(max_grad_norm=1.5, noise_multiplier=1.0)
SETTINGS = auditable(PRIVACY, PerformanceConfig(), sample_rate=0.25, steps=4)


@pytest.fixture(scope="module")
def two_ranks():
    import distributed_world

    with distributed_world.World(2) as world:
        yield world


@pytest.fixture(scope="module")
def findings(two_ranks):
    def read(noise_bug=None, shard_bug=None, clipping="flat"):
        noise = two_ranks.run(CASES, "probe", 2, bug=noise_bug, what="noise", clipping=clipping)
        shards = two_ranks.run(CASES, "probe", 2, bug=shard_bug, what="shards", clipping=clipping)
        return RankFindings(
            own=np.concatenate([own for own, _ in noise]),
            whole=tuple(whole for _, whole in noise),
            shards=shards[0],
        )

    return read


def failed(found):
    return {check.name for check in rank_checks(found) if not check.ok}


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_two_honest_ranks_pass(findings, clipping):
    found = findings(clipping=clipping)
    assert failed(found) == set()
    assert found.shards.drawn.sum() > 20


def test_noise_that_ranks_share_fails(findings):
    assert "noise across ranks" in failed(findings(noise_bug="ranks share one noise"))


def test_squares_of_context_shards_added_fail(findings):
    found = findings(shard_bug="squares of shards added")
    assert failed(found) == {"canaries across context shards"}
    largest = float(found.shards.units.max())
    assert largest == pytest.approx(2**0.5, abs=0.1)


@pytest.mark.cases(0)
def test_processes_of_an_audit_read_what_ranks_of_a_job_do():
    with RankProbes(Audited(PrivacyEngine, {"seed": 0}, *SETTINGS)) as started:
        assert failed(started.read()) == set()


@pytest.mark.cases(0)
def test_processes_that_fail_say_why():
    audited = Audited(PrivacyEngine, {"accountant": "abacus"}, *SETTINGS)
    with RankProbes(audited) as started, pytest.raises(RankFailure, match="abacus"):
        started.read()
