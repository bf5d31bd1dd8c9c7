"""Tokens: short, the same everywhere, and refused in one sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.groups.plan import Order, Position
from flightedl.domain.groups.shuffling import Shuffling
from flightedl.domain.groups.token import Token, decode, encode, require_same_data
from flightedl.errors import UsageError

numbers = st.integers(0, 2**40)
positions = st.builds(Position, numbers, numbers, st.builds(Order, numbers, numbers))
shufflings = st.builds(Shuffling, numbers, numbers, numbers)
TOKEN = Token("0123456789abcdef", 7, Position(1, 32, Order(8, 4096)), Shuffling(0, 1 << 15, 1 << 30))


@given(st.text(max_size=40), st.none() | st.integers(0, 2**64 - 1), positions, shufflings)
def test_a_token_is_decoded_from_its_text(data, seed, position, shuffling):
    token = Token(data, seed, position, shuffling)

    assert decode(encode(token)) == token


def test_the_text_of_a_token_never_changes():
    """Users' checkpoints contain it."""
    assert encode(TOKEN) == GOLDEN
    assert str(TOKEN) == "epoch 2 after 32 records"


GOLDEN = "flightedl-data:3:1528abea:l&~-{GBY$aHa9pqVPa!sWo8GH0U(kH%@6>S0L_2^&OiVF00"


def test_every_truncated_or_changed_text_is_refused():
    text = encode(TOKEN)
    for end in range(len("flightedl-data:3:"), len(text)):
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


def test_other_versions_are_refused():
    with pytest.raises(UsageError, match=r"saved by a newer flightedl \(format 4, this one knows 3\)"):
        decode("flightedl-data:4:00000000:whatever")
    for version in (1, 2):
        with pytest.raises(UsageError, match=rf"saved by an older flightedl \(format {version}, .* in another order"):
            decode(f"flightedl-data:{version}:00000000:whatever")


def test_other_data_and_other_orders_are_refused():
    require_same_data(TOKEN, "0123456789abcdef", 7, TOKEN.shuffling)
    with pytest.raises(UsageError, match="belongs to other data"):
        require_same_data(TOKEN, "fedcba", 7, TOKEN.shuffling)
    with pytest.raises(UsageError, match="belongs to seed=7, but the data is declared with shuffle=False"):
        require_same_data(TOKEN, "0123456789abcdef", None, TOKEN.shuffling)
    with pytest.raises(UsageError, match=r"shuffle_block=32768 and .*, but the data is declared with lanes=4"):
        require_same_data(TOKEN, "0123456789abcdef", 7, Shuffling(4))


def test_a_token_is_small():
    most = Token(
        "0123456789abcdef" * 2, 2**64 - 1, Position(2**40, 2**40, Order(64, 2**40)), Shuffling(64, 2**40, 2**40)
    )
    assert len(encode(most)) < 200
