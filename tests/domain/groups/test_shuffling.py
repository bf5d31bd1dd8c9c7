"""Choice of the order, and its consequences for users."""

import re

import numpy as np
import pytest

from flightedl.domain.groups.lanes import GroupData
from flightedl.domain.groups.plan import Order
from flightedl.domain.groups.shuffling import Shuffling, advice_of, order_of
from flightedl.errors import UsageError

MB = 1 << 20


def data_of(chunks, records=1000, size_bytes=MB, seed=1, **more):
    sources = np.zeros(chunks, np.int64)
    return GroupData(np.full(chunks, records), np.full(chunks, size_bytes), sources, seed=seed, **more)


@pytest.mark.parametrize(
    ("chunks", "batch_size", "size_bytes", "lanes"),
    [
        (1000, 256, MB, 64),
        (1000, 96, MB, 48),
        (1000, 100, MB, 50),
        (13, 32, MB, 8),
        (1, 32, MB, 1),
        (1000, 31, MB, 1),
        (1000, 2, MB, 1),
        # Chunks of 64 MB: 16 of them take 1 GiB.
        (1000, 256, 64 * MB, 16),
        (1000, 256, 512 * MB, 8),
        (1000, 12, 512 * MB, 6),
    ],
)
def test_lanes_are_the_greatest_divisor_that_fits(chunks, batch_size, size_bytes, lanes):
    assert order_of(data_of(chunks, size_bytes=size_bytes), batch_size, Shuffling()).lanes == lanes


def test_windows_have_a_share_of_the_block_or_of_the_memory():
    assert order_of(data_of(1000), 256, Shuffling()) == Order(64, (1 << 18) // 64)
    assert order_of(data_of(1000), 256, Shuffling(block=1000)) == Order(64, 1000 // 64)
    assert order_of(data_of(1000), 256, Shuffling(block=10)) == Order(64, 1)
    assert order_of(data_of(1000), 256, Shuffling(size_bytes=64 * MB)) == Order(64, 1000)
    assert order_of(data_of(1000, seed=None), 256, Shuffling()) == Order(1, 0)
    assert order_of(data_of(1000, seed=None), 256, Shuffling(lanes=4)) == Order(4, 0)


@pytest.mark.parametrize(("chunks", "lanes"), [(1000, 7), (2, 4), (10_000, 2048)])
def test_lanes_that_do_not_fit_are_refused(chunks, lanes):
    with pytest.raises(UsageError, match=rf"lanes is {lanes}, but must divide the global batch of 4096 .* at most \d+"):
        order_of(data_of(chunks), 4096, Shuffling(lanes=lanes))


def test_a_source_of_a_mixture_has_a_record_for_each_lane():
    data = GroupData(np.array([3, 500, 500]), np.full(3, MB), np.array([0, 1, 1]), (0.5, 0.5), "first", 1)
    assert order_of(data, 64, Shuffling()).lanes == 2


def advice(data, batch_size=32, world_size=2, **given):
    shuffling = Shuffling(**given)
    return advice_of(data, order_of(data, batch_size, shuffling), batch_size, world_size, shuffling)


def test_advice_says_what_a_batch_mixes_and_what_a_rank_holds():
    found = advice(data_of(13, 140, 40_000))
    assert found.text == (
        "a global batch of 32 records mixes records of about 13 of 13 chunks (lanes=8, window=32,768 records); "
        "a rank reads 4 of 8 lanes and holds at most 0.8 MB"
    )
    assert (found.mixed_chunks, found.warnings) == (13, ())
    assert "a rank reads 4 of 8 lanes" in advice(data_of(13), world_size=3).text
    assert "a rank reads 1 of 8 lanes" in advice(data_of(13), world_size=16).text


@pytest.mark.parametrize(
    ("data", "given", "sentence"),
    [
        (data_of(1, 10**6), {}, "shuffle=True mixes only 262,144 of 1,000,000 records at a time: rewrite the files"),
        (
            data_of(1, 10**6),
            {},
            "there is only one lane, so each of the 2 ranks decodes all records: `flightedl",
        ),
        (data_of(1000, 10**6), {"batch_size": 31, "world_size": 1}, "choose a global batch that has a divisor from 8"),
        (data_of(1000, seed=None), {}, "there is only one lane, so .* lanes= divides them, too"),
        (data_of(100, size_bytes=400 * MB), {}, r"a chunk has up to 419.4 MB decoded, so a rank may hold [\d.]+ GB"),
    ],
)
def test_advice_warns_when_the_files_do_not_allow_it(data, given, sentence):
    warnings = advice(data, **given).warnings
    assert any(re.search(sentence, each) for each in warnings), warnings


def test_small_data_is_shuffled_as_a_whole():
    assert advice(data_of(1), world_size=1).warnings == ()
