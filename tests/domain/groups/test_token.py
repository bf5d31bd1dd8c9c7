"""Tokens: short, the same everywhere, and refused in one sentence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.groups.plan import Position, RoundPlan
from flightedl.domain.groups.token import Token, decode, encode, require_same_data
from flightedl.errors import UsageError

from .calls import calls_of

numbers = st.integers(0, 2**40)
positions = st.builds(
    lambda epoch, records, unopened, opened: Position(epoch, records, unopened, tuple(sorted(opened.items()))),
    numbers,
    numbers,
    numbers,
    st.dictionaries(numbers, numbers, max_size=20),
)
TOKEN = Token("0123456789abcdef", 7, Position(1, 32, 4, ((2, 6), (3, 6))))


@given(st.text(max_size=40), st.none() | st.integers(0, 2**64 - 1), positions)
def test_a_token_is_decoded_from_its_text(data, seed, position):
    token = Token(data, seed, position)

    assert decode(encode(token)) == token


def test_the_text_of_a_token_never_changes():
    """Users' checkpoints contain it."""
    assert encode(TOKEN) == GOLDEN
    assert str(TOKEN) == "epoch 2 after 32 records"


GOLDEN = "flightedl-data:1:7e67c5f6:m9Q`|GBY$aHa9pqVPa!sWo8GI0U!jBk^%ve1_l"


def test_every_truncated_or_changed_text_is_refused():
    text = encode(TOKEN)
    for end in range(len("flightedl-data:1:"), len(text)):
        with pytest.raises(UsageError, match="damaged or incomplete"):
            decode(text[:end])
        changed = text[:end] + chr(ord(text[end]) ^ 1) + text[end + 1 :]
        with pytest.raises(UsageError, match="damaged or incomplete"):
            decode(changed)


NO_TOKENS = ["", "nothing", "other:1:00:00", "flightedl-data", "flightedl-data:x:0:0", None, 3, b""]


@pytest.mark.parametrize("text", NO_TOKENS)
def test_invalid_tokens_are_refused(text):
    with pytest.raises(UsageError, match="not a position in flightedl's data"):
        decode(text)


def test_a_newer_version_is_refused():
    with pytest.raises(UsageError, match=r"saved by a newer flightedl \(format 2, this one knows 1\)"):
        decode("flightedl-data:2:00000000:whatever")


def test_other_data_and_other_seeds_are_refused():
    require_same_data(TOKEN, "0123456789abcdef", 7)
    with pytest.raises(UsageError, match="belongs to other data"):
        require_same_data(TOKEN, "fedcba", 7)
    with pytest.raises(UsageError, match="belongs to seed=7, but the data is declared with shuffle=False"):
        require_same_data(TOKEN, "0123456789abcdef", None)


@pytest.mark.parametrize("records", [1000, 100_000])
def test_a_token_is_small_and_made_with_few_calls_for_a_million_tasks_and_many_ranks(records):
    sizes = np.full(1_000_000, records, np.int64)
    plan = RoundPlan(sizes, epochs=1, seed=1, world_size=512, rank=0, batch_size=100)
    for _ in range(7):
        plan.next()

    text = encode(Token("0123456789abcdef" * 2, 2**64 - 1, plan.position()))

    assert len(text) <= 4096
    assert len(decode(text).position.opened) == 512
    # A position contains the plan's state for each rank, not for each task.
    assert calls_of(lambda: encode(Token("0123456789abcdef" * 2, 1, plan.position()))) < 10_000
