"""Place in the script at which an error was raised."""

from __future__ import annotations

from flightedl.client.data.reading import place_of


def fail(value: int) -> None:
    raise KeyError(f"user {value}")


def raised(value: int, *, otherwise: bool = False) -> KeyError:
    try:
        if otherwise:
            fail(value)
        fail(value)
    except KeyError as error:
        return error


def test_the_same_error_at_another_record_has_the_same_location() -> None:
    assert place_of(raised(1)) == place_of(raised(2))
    assert place_of(raised(1)) != place_of(raised(1, otherwise=True))


def test_a_location_names_class_and_lines_but_neither_directories_nor_values() -> None:
    place = place_of(raised(17))
    assert place.startswith("KeyError at test_error_places.py:")
    assert place.count("test_error_places.py:") == 2
    assert "17" not in place.replace(":17", "")
    assert "/" not in place
