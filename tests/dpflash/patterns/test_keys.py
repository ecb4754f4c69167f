import dataclasses
import json
import pickle

import numpy as np
import pytest

import dpflash.patterns
from dpflash.patterns import (
    BlockSparse,
    Dense,
    Dilated,
    Documents,
    Hierarchical,
    SlidingWindow,
    from_key,
)

PATTERNS = [
    Dense(),
    Dense(causal=True),
    SlidingWindow(window=np.int64(4), global_tokens=1),
    Documents(cu_seqlens=[0, 3, 8], causal=True),
    Dilated(segment_lengths=[4, 8], dilation_rates=[1, 2], overlap="set", offset="group"),
    Dilated(segment_lengths=[4, 8], dilation_rates=[1, 2], heads="grouped"),
    BlockSparse(block_size=4, random_blocks=2, seed=7),
    BlockSparse(block_size=4, block_lists=[[0], [0, 1]]),
    BlockSparse(block_size=4, block_lists=[[[0], [0, 1]], [[], [1]]]),
    Hierarchical(levels=[[64, 256], [256, -1]], block_size=32),
]


def _ids(pattern):
    return type(pattern).__name__


@pytest.mark.parametrize("pattern", PATTERNS, ids=_ids)
def test_a_key_gives_its_pattern_back(pattern):
    again = from_key(pattern.key)
    assert again == pattern
    assert type(again) is type(pattern)
    assert hash(again) == hash(pattern)
    assert again.key == pattern.key
    assert from_key(pattern.key) is again


@pytest.mark.parametrize("pattern", PATTERNS, ids=_ids)
def test_patterns_are_frozen_hashable_and_survive_pickling(pattern):
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    with pytest.raises(dataclasses.FrozenInstanceError):
        pattern.causal = True


def test_different_patterns_differ_in_hash_equality_and_key():
    assert len(set(PATTERNS)) == len({pattern.key for pattern in PATTERNS}) == len(PATTERNS)


def test_lists_and_tuples_make_equal_patterns():
    listed = Dilated(segment_lengths=[4, 8], dilation_rates=[1, 2])
    assert listed == Dilated(segment_lengths=(4, 8), dilation_rates=(1, 2))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "[]",
        "{}",
        '{"pattern": "Dens"}',
        '{"pattern": "Dense", "window": 3}',
        '{"pattern": []}',
    ],
)
def test_a_key_of_no_pattern_is_refused(key):
    with pytest.raises(ValueError, match="^key="):
        from_key(key)


def test_a_key_with_bad_arguments_is_refused_by_their_name():
    with pytest.raises(ValueError, match="^window="):
        from_key(json.dumps({"pattern": "SlidingWindow", "window": -1}))


def test_every_exported_pattern_has_a_key():
    exported = {getattr(dpflash.patterns, name) for name in dpflash.patterns.__all__}
    patterns = {cls for cls in exported if isinstance(cls, type)} - {dpflash.patterns.Pattern}
    assert patterns == set(dpflash.patterns._PATTERNS.values())
