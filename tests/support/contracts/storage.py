"""Contract suite for ``ports.Storage``. Inherit :class:`StorageContract`, and provide an empty fixture ``storage``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from flightedl.errors import CorruptError, FencedError, NotFoundError
from flightedl.ports import Storage, StoredFile


class CrashError(Exception):
    """Error raised by a test's own iterable."""


class StorageContract:
    """Behavior of every storage: a file is published completely or not at all."""

    def test_a_published_file_is_readable(self, storage: Storage) -> None:
        size = storage.publish("c-1/shard-0.arrow", [b"abc", memoryview(b"defg"), b""])
        assert size == 7
        assert storage.read("c-1/shard-0.arrow") == b"abcdefg"

    def test_views_of_wider_items_are_written_as_bytes(self, storage: Storage) -> None:
        words = memoryview(bytes(range(16))).cast("Q")
        assert storage.publish("words", [words]) == 16
        assert storage.read("words") == bytes(range(16))

    def test_an_empty_file_is_published(self, storage: Storage) -> None:
        assert storage.publish("empty", []) == 0
        assert storage.read("empty") == b""
        assert storage.list("") == (StoredFile("empty", 0),)

    def test_a_large_file_is_published_completely(self, storage: Storage) -> None:
        part = bytes(range(256)) * 4096
        assert storage.publish("big", (part for _ in range(20))) == 20 * len(part)
        assert storage.read("big") == part * 20
        assert storage.read_range("big", 3 * len(part) - 5, 10) == part[-5:] + part[:5]

    def test_a_range_is_read_exactly_or_reported_as_truncated(self, storage: Storage) -> None:
        storage.publish("a", [b"0123456789"])
        assert storage.read_range("a", 0, 10) == b"0123456789"
        assert storage.read_range("a", 3, 4) == b"3456"
        assert storage.read_range("a", 10, 0) == b""
        with pytest.raises(CorruptError, match="truncated"):
            storage.read_range("a", 8, 3)
        with pytest.raises(CorruptError):
            storage.read_range("a", 20, 1)

    def test_an_absent_file_is_not_found(self, storage: Storage) -> None:
        with pytest.raises(NotFoundError, match="none"):
            storage.read("none")
        with pytest.raises(NotFoundError):
            storage.read_range("dir/none", 0, 1)

    def test_publishing_again_replaces_the_file(self, storage: Storage) -> None:
        storage.publish("a", [b"old and longer"])
        storage.publish("a", [b"new"])
        assert storage.read("a") == b"new"
        assert storage.list("") == (StoredFile("a", 3),)

    @pytest.mark.parametrize("error", [CrashError, KeyboardInterrupt, FileNotFoundError])
    def test_a_publish_that_fails_half_way_leaves_nothing(self, storage: Storage, error: type[BaseException]) -> None:
        def parts() -> Iterator[bytes]:
            yield b"x" * (1 << 20)
            raise error("half-way")

        with pytest.raises(error, match="half-way"):
            storage.publish("d/new", parts())
        assert storage.list("") == ()
        storage.publish("d/old", [b"old"])
        with pytest.raises(error, match="half-way"):
            storage.publish("d/old", parts())
        assert storage.read("d/old") == b"old"
        assert storage.list("") == (StoredFile("d/old", 3),)

    def test_a_file_is_invisible_until_it_is_complete(self, storage: Storage) -> None:
        def parts() -> Iterator[bytes]:
            yield b"x" * (1 << 20)
            assert storage.list("") == ()
            yield b"y"

        storage.publish("a", parts())
        assert storage.list("") == (StoredFile("a", (1 << 20) + 1),)

    def test_a_requirement_is_checked_after_the_last_part_and_keeps_the_old_file(self, storage: Storage) -> None:
        storage.publish("a", [b"old"])
        written: list[bytes] = []

        def parts() -> Iterator[bytes]:
            for part in (b"n", b"ew"):
                written.append(part)
                yield part

        def refuse() -> None:
            assert written == [b"n", b"ew"]
            assert storage.read("a") == b"old"
            raise FencedError("another process owns the file")

        with pytest.raises(FencedError):
            storage.publish("a", parts(), refuse)
        assert storage.read("a") == b"old"
        assert [file.name for file in storage.list("")] == ["a"]

    def test_a_listing_is_sorted_and_filtered_by_prefix(self, storage: Storage) -> None:
        for name in ("job/c-2/b", "job/c-1/a", "job/c-10/a", "other", "job/c-2/a"):
            storage.publish(name, [name.encode()])
        assert [file.name for file in storage.list("")] == sorted(
            ("job/c-2/b", "job/c-1/a", "job/c-10/a", "other", "job/c-2/a")
        )
        assert [file.name for file in storage.list("job/c-1")] == ["job/c-1/a", "job/c-10/a"]
        assert [file.name for file in storage.list("job/c-1/")] == ["job/c-1/a"]
        assert storage.list("nothing/") == ()

    def test_a_listing_is_never_stale(self, storage: Storage) -> None:
        for i in range(3):
            storage.publish(f"d/{i}", [b""])
            assert len(storage.list("d/")) == i + 1
        storage.delete("d/1")
        assert [file.name for file in storage.list("d/")] == ["d/0", "d/2"]

    def test_deleting_is_idempotent(self, storage: Storage) -> None:
        storage.publish("a", [b"1"])
        storage.delete("a")
        storage.delete("a")
        storage.delete("none/none")
        with pytest.raises(NotFoundError):
            storage.read("a")

    def test_readers_see_the_old_or_the_new_file(self, storage: Storage) -> None:
        contents = [bytes((i,)) * 50_000 for i in range(8)]
        storage.publish("a", [contents[0]])
        over = threading.Event()

        def read() -> int:
            count = 0
            while not over.is_set() or count == 0:
                assert storage.read("a") in contents
                count += 1
            return count

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            for content in contents:
                storage.publish("a", [content[:1000], content[1000:]])
            over.set()
            assert all(reader.result() > 0 for reader in readers)
