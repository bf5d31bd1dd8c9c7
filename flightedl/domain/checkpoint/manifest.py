"""The manifest: what makes a set of files a checkpoint, and which of those in a store is the one to load.

Rules:

* A checkpoint without a manifest does not exist. The manifest is written last, under ``c-<number>/manifest.json``, and
  names every shard file with size and xxh3-128.
* A number belongs to one master for ever (it is stored under the master's fence before the first order goes out), and a
  shard file's name has its writer's generation and the order's serial in it. So nobody ever writes a name twice with
  other contents, and a master that was deposed can at worst complete a checkpoint of its own number.
* The document ends in a checksum of all that comes before. One flipped bit, or one missing byte, and it does not load.
* A file may be an increment: then the files that it is built on, its ``links``, belong to the checkpoint, too, though
  they lie with older ones (see ``chains``).
* Names are relative to the storage of the job.

Not guaranteed: that the files named still have the bytes they had; who loads them compares their hashes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from flightedl.domain.recovery.store_history import Sighting
from flightedl.errors import CorruptError
from flightedl.messages.control import WrittenFile
from flightedl.messages.decoding import from_json

FORMAT = 1
_MANIFEST = re.compile(r"c-(0|[1-9][0-9]{0,17})/manifest\.json")
_FILE = re.compile(r"c-(0|[1-9][0-9]{0,17})/[^/]+")
_INCREMENT = re.compile(r"c-(?:0|[1-9][0-9]{0,17})/shard-.*-on-(0|[1-9][0-9]{0,17})\.arrow")


def manifest_name(number: int) -> str:
    """Where the manifest of a checkpoint lies."""
    return f"c-{number}/manifest.json"


def shard_name(
    number: int, index: int, pserver_count: int, generation: int, serial: int, since: int | None = None
) -> str:
    """A name that nobody else writes: numbers are unique among masters, serials within a number.

    ``since``: of an increment, the checkpoint that its chain begins with.
    """
    on = "" if since is None or since == number else f"-on-{since}"
    return f"c-{number}/shard-{index}-of-{pserver_count}-{generation}-{serial}{on}.arrow"


def since_of(name: str) -> int | None:
    """The checkpoint that the chain of a file begins with, by its name; None: it is no increment."""
    found = _INCREMENT.fullmatch(name)
    return None if found is None else int(found[1])


def number_of(name: str) -> int | None:
    """The checkpoint that a file belongs to; None: not a checkpoint's file."""
    found = _FILE.fullmatch(name)
    return None if found is None else int(found[1])


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of an older checkpoint that an increment is built on."""

    #: Of that checkpoint.
    number: int
    name: str
    size_bytes: int
    hash: str
    row_bytes: int


class ShardFile(WrittenFile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pserver's part of a checkpoint."""

    index: int
    #: Of the process that wrote it.
    generation: int
    #: Of an increment: what it is built on, the base first. Filled in by the master.
    links: tuple[Link, ...] = ()

    @classmethod
    def of(cls, index: int, generation: int, file: WrittenFile) -> ShardFile:
        """Return the file that this process of a pserver has written."""
        return cls(
            index=index, generation=generation, **{name: getattr(file, name) for name in WrittenFile.__struct_fields__}
        )

    @property
    def chain(self) -> tuple[Link | ShardFile, ...]:
        """All files that have rows of this pserver, in the order in which they have to be read."""
        return (*self.links, self)


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: msgspec.Raw
    checksum: str


_NOTHING = msgspec.Raw(b"null")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All about one checkpoint but the values themselves. Documents in it are JSON; ``null``: there is none."""

    format: int = FORMAT
    job: str
    number: int
    #: Of the plan by which the blocks lay on the pservers, see ``sharding.plan_for``.
    plan_hash: str
    pserver_count: int
    #: For how many pservers the parameters were cut into blocks.
    cut_for: int
    #: The agreed round at whose beginning all blocks were copied; None: each pserver's blocks as they were.
    round: int | None
    #: Seconds since 1970, for people.
    created_s: float
    #: By index.
    shards: tuple[ShardFile, ...]
    #: The first checkpoint of these values' line: lower ones may have grown from other first values.
    first: int = 0
    #: The job's declaration.
    declaration: msgspec.Raw = _NOTHING
    #: The task queue (``TaskQueue.encode``).
    queue: msgspec.Raw = _NOTHING
    #: Results of the evaluations that were through.
    evaluations: msgspec.Raw = _NOTHING
    #: etcd as the master saw it at last; None: not known.
    etcd: Sighting | None = None

    @property
    def stored_declaration(self) -> bytes | None:
        return _document(self.declaration)

    @property
    def stored_queue(self) -> bytes | None:
        """The task queue; None: the job has no dataset."""
        return _document(self.queue)

    @property
    def stored_evaluations(self) -> bytes | None:
        return _document(self.evaluations)

    def encode(self) -> bytes:
        """One line of JSON; ``checksum`` is over the bytes of ``body``."""
        encoded = msgspec.json.encode(self)
        return msgspec.json.encode(_Document(body=msgspec.Raw(encoded), checksum=checksum(encoded)))

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """What ``encode`` wrote.

        Raises:
            CorruptError: anything else.
        """
        try:
            document = from_json(data, _Document)
            if document.checksum != checksum(bytes(document.body)) or msgspec.json.encode(document) != data:
                raise CorruptError("the manifest does not match its checksum")
            manifest = from_json(document.body, cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptError(f"not a manifest: {str(error)[:200]}") from None
        if manifest.format != FORMAT:
            raise CorruptError(f"a manifest of format {manifest.format}: this flightedl reads format {FORMAT}")
        if [shard.index for shard in manifest.shards] != list(range(manifest.pserver_count)):
            raise CorruptError("the manifest does not name one file for each pserver")
        for shard in manifest.shards:
            numbers = [*(link.number for link in shard.links), manifest.number]
            if numbers != sorted(set(numbers)) or shard.after != (shard.links[-1].name if shard.links else ""):
                raise CorruptError(f"{shard.name} is an increment on other files than the manifest names")
        return manifest


def _document(raw: msgspec.Raw) -> bytes | None:
    document = bytes(raw)
    return None if document == b"null" else document


def checksum(data: bytes) -> str:
    """32 hex digits; also what the pointer remembers of a manifest."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# --- which one to load ---


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that cannot be loaded, and why: to be reported."""

    number: int
    reason: str


def candidates(names: Iterable[str]) -> tuple[int, ...]:
    """Numbers of all checkpoints that have a manifest, newest first."""
    return tuple(sorted({int(m[1]) for name in names if (m := _MANIFEST.fullmatch(name))}, reverse=True))


def without_manifest(names: Collection[str]) -> tuple[Skipped, ...]:
    """Checkpoints that were begun and never became one, newest first."""
    begun = {number for name in names if (number := number_of(name)) is not None}
    return tuple(
        Skipped(number, "it has no manifest: it was never completed")
        for number in sorted(begun.difference(candidates(names)), reverse=True)
    )


def examine(number: int, data: bytes, sizes: Mapping[str, int], job: str) -> Manifest | Skipped:
    """Whether a checkpoint is what it says it is, as far as a listing shows.

    Args:
        number: Where the manifest was found.
        data: Its bytes.
        sizes: name -> size in bytes of all files there are.
        job: The job that wants to load it.
    """
    try:
        manifest = Manifest.decode(data)
    except CorruptError as error:
        return Skipped(number, str(error))
    if manifest.job != job:
        return Skipped(number, f"it is of job {manifest.job!r}")
    if manifest.number != number:
        return Skipped(number, f"its manifest is that of checkpoint {manifest.number}")
    for file in (file for shard in manifest.shards for file in shard.chain):
        size_bytes = sizes.get(file.name)
        if size_bytes is None:
            return Skipped(number, f"{file.name} is missing")
        if size_bytes != file.size_bytes:
            return Skipped(number, f"{file.name} has {size_bytes} bytes instead of {file.size_bytes}")
    return manifest


# --- what may be deleted ---


def deletable(
    names: Collection[str], latest: int, keep: int, keep_every: int | None, rejected: Collection[int] = ()
) -> tuple[str, ...]:
    """What retention lets go, in the order in which it has to be deleted: manifests before what they name.

    Who deletes stops at the first failure.

    The newest ``keep`` checkpoints up to ``latest`` stay with all that their chains begin with, and those whose number
    is a multiple of ``keep_every``, which have no chains. Below the oldest of the newest ``keep``, or of what their
    chains need, everything else goes, also what never got a manifest. Nothing at or above it is touched: so a manifest
    that a deposed master completes late either names files that are all there, or is older than every checkpoint that
    is kept, and goes with the next sweep.

    Args:
        names: All files there are.
        latest: The checkpoint that the pointer names, by a stored transaction.
        keep: At least 1.
        keep_every: None: no others.
        rejected: Checkpoints that could not be loaded; they count for nothing.
    """
    complete = [number for number in candidates(names) if number <= latest and number not in rejected]
    if latest not in complete:
        # What the pointer names is not there: no time to delete anything.
        return ()
    kept = complete[:keep]
    #: (the checkpoint that a chain begins with, one that has an increment of it)
    chains = [(since, number) for name in names if (since := since_of(name)) and (number := number_of(name))]
    floor = min([kept[-1], *(since for since, number in chains if number in kept)])
    lasting = {number for number in complete if keep_every and number % keep_every == 0}
    # They are bases, unless others were to be kept when they were made.
    lasting |= {older for since, number in chains if number in lasting for older in range(since, number)}
    going = [
        name for name in names if (number := number_of(name)) is not None and number < floor and number not in lasting
    ]
    return tuple(sorted(going, key=lambda name: (number_of(name), _MANIFEST.fullmatch(name) is None, name)))
