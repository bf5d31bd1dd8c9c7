"""The manifest, which turns a set of files into a checkpoint, and the rules for choosing the checkpoint to load.

Rules:

* A checkpoint without a manifest does not exist. The manifest is written last, as ``c-<number>/manifest.json``, and
  lists every shard file with its size and xxh3-128 hash.
* A checkpoint's number is used by a single master, because it is stored under the master's fence before the first order
  is sent. A shard file's name contains its writer's generation and the order's serial. Thus two files with different
  contents never share a name. A deposed master can at worst complete a checkpoint under its own number.
* The document ends with a checksum of everything before it, which detects flipped bits and missing bytes.
* A file may be an increment. Then the files on which it is based, its ``links``, also belong to the checkpoint, even
  though they were written for earlier checkpoints (see ``chains``).
* All names are relative to the job's storage.

The manifest does not protect files from being altered, so readers must verify the hashes of the files.
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
#: File that names the etcd cluster, the host and the time of the newest checkpoint.
WRITER = "writer.txt"
_MANIFEST = re.compile(r"c-(0|[1-9][0-9]{0,17})/manifest\.json")
_FILE = re.compile(r"c-(0|[1-9][0-9]{0,17})/[^/]+")
_INCREMENT = re.compile(r"c-(?:0|[1-9][0-9]{0,17})/shard-.*-on-(0|[1-9][0-9]{0,17})\.arrow")


def manifest_name(number: int) -> str:
    """Return the name of a checkpoint's manifest."""
    return f"c-{number}/manifest.json"


def shard_name(
    number: int, index: int, pserver_count: int, generation: int, serial: int, since: int | None = None
) -> str:
    """Return a unique file name. Numbers are unique among masters, and serials are unique within a number.

    For an increment, ``since`` is the checkpoint that contains the chain's base.
    """
    on = "" if since is None or since == number else f"-on-{since}"
    return f"c-{number}/shard-{index}-of-{pserver_count}-{generation}-{serial}{on}.arrow"


def since_of(name: str) -> int | None:
    """Return the number of the checkpoint that contains an increment's base, or None for other files."""
    found = _INCREMENT.fullmatch(name)
    return None if found is None else int(found[1])


def number_of(name: str) -> int | None:
    """Return the number of the checkpoint to which a file belongs, or None if it is not a checkpoint file."""
    found = _FILE.fullmatch(name)
    return None if found is None else int(found[1])


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of an older checkpoint, on which an increment is based."""

    #: Number of that checkpoint.
    number: int
    name: str
    size_bytes: int
    hash: str
    row_bytes: int


class ShardFile(WrittenFile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pserver's file in a checkpoint."""

    index: int
    #: Generation of the process that wrote the file.
    generation: int
    #: Files on which an increment is based, base first. The master fills this in.
    links: tuple[Link, ...] = ()

    @classmethod
    def of(cls, index: int, generation: int, file: WrittenFile) -> ShardFile:
        return cls(
            index=index, generation=generation, **{name: getattr(file, name) for name in WrittenFile.__struct_fields__}
        )

    @property
    def chain(self) -> tuple[Link | ShardFile, ...]:
        """All files with rows of this pserver, in the order in which they must be read."""
        return (*self.links, self)


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: msgspec.Raw
    checksum: str


_NOTHING = msgspec.Raw(b"null")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of a checkpoint. Nested documents are stored as JSON, or ``null`` if absent."""

    format: int = FORMAT
    job: str
    number: int
    #: Hash of the plan that assigned the blocks to pservers, as computed by ``sharding.plan_for``.
    plan_hash: str
    pserver_count: int
    #: Number of pservers when the parameters were divided into blocks.
    cut_for: int
    #: The round at whose start all blocks were copied; None if no common round was agreed on.
    round: int | None
    #: Seconds since 1970, for people.
    created_s: float
    #: Files by pserver index.
    shards: tuple[ShardFile, ...]
    #: Number of this model's first checkpoint. Earlier checkpoints may come from different initial values.
    first: int = 0
    #: The job's declaration.
    declaration: msgspec.Raw = _NOTHING
    #: The task queue (``TaskQueue.encode``).
    queue: msgspec.Raw = _NOTHING
    #: Results of finished evaluations.
    evaluations: msgspec.Raw = _NOTHING
    #: Last state of etcd that the master observed; None if unknown.
    etcd: Sighting | None = None

    @property
    def stored_declaration(self) -> bytes | None:
        return _document(self.declaration)

    @property
    def stored_queue(self) -> bytes | None:
        return _document(self.queue)

    @property
    def stored_evaluations(self) -> bytes | None:
        return _document(self.evaluations)

    def encode(self) -> bytes:
        """Return ``body`` as one line of JSON, ending with a checksum of the preceding bytes."""
        encoded = msgspec.json.encode(self)
        return msgspec.json.encode(_Document(body=msgspec.Raw(encoded), checksum=checksum(encoded)))

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode the output of ``encode``. Raises CorruptError for anything else."""
        try:
            document = from_json(data, _Document)
            if document.checksum != checksum(bytes(document.body)) or msgspec.json.encode(document) != data:
                raise CorruptError("the manifest does not match its checksum")
            manifest = from_json(document.body, cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptError(f"not a manifest: {str(error)[:200]}") from None
        if manifest.format != FORMAT:
            raise CorruptError(f"the manifest has format {manifest.format}, but this flightedl reads format {FORMAT}")
        if [shard.index for shard in manifest.shards] != list(range(manifest.pserver_count)):
            raise CorruptError("the manifest does not name one file for each pserver")
        for shard in manifest.shards:
            numbers = [*(link.number for link in shard.links), manifest.number]
            if numbers != sorted(set(numbers)) or shard.after != (shard.links[-1].name if shard.links else ""):
                raise CorruptError(f"{shard.name} is based on other files than the manifest lists")
        return manifest


def _document(raw: msgspec.Raw) -> bytes | None:
    document = bytes(raw)
    return None if document == b"null" else document


def checksum(data: bytes) -> str:
    """Return a checksum of 32 hex digits. The pointer identifies the manifest by such a checksum."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# --- choosing the checkpoint to load ---


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that cannot be loaded, and the reason."""

    number: int
    reason: str


def candidates(names: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of the checkpoints that have a manifest, newest first."""
    return tuple(sorted({int(m[1]) for name in names if (m := _MANIFEST.fullmatch(name))}, reverse=True))


def without_manifest(names: Collection[str]) -> tuple[Skipped, ...]:
    """Return the numbers of incomplete checkpoints, newest first."""
    begun = {number for name in names if (number := number_of(name)) is not None}
    return tuple(
        Skipped(number, "it has no manifest, so it was never completed")
        for number in sorted(begun.difference(candidates(names)), reverse=True)
    )


def examine(number: int, data: bytes, sizes: Mapping[str, int], job: str) -> Manifest | Skipped:
    """Verify as much of a checkpoint as a file listing allows.

    Return the checkpoint's manifest, or the reason why the checkpoint cannot be loaded.

    Args:
        number: Number of the checkpoint by the manifest's name.
        data: Bytes of the manifest.
        sizes: Name -> size in bytes of all files.
        job: Name of the job that loads the checkpoint.
    """
    try:
        manifest = Manifest.decode(data)
    except CorruptError as error:
        return Skipped(number, str(error))
    if manifest.job != job:
        return Skipped(number, f"it belongs to job {manifest.job!r}")
    if manifest.number != number:
        return Skipped(number, f"it has the manifest of checkpoint {manifest.number}")
    for file in (file for shard in manifest.shards for file in shard.chain):
        size_bytes = sizes.get(file.name)
        if size_bytes is None:
            return Skipped(number, f"{file.name} is missing")
        if size_bytes != file.size_bytes:
            return Skipped(number, f"{file.name} has {size_bytes} bytes instead of {file.size_bytes}")
    return manifest


# --- retention ---


def deletable(
    names: Collection[str], latest: int, keep: int, keep_every: int | None, rejected: Collection[int] = ()
) -> tuple[str, ...]:
    """Return the files that retention allows the caller to delete.

    Manifests come before all other files. Delete in this order, and stop at the first failure.

    Retention keeps the newest ``keep`` checkpoints up to ``latest`` together with the bases of their chains, and every
    checkpoint whose number is a multiple of ``keep_every``; those checkpoints have no chains. All other files are
    deleted, even those without a manifest, if they are older than everything that the newest ``keep`` checkpoints need.
    No newer file is deleted, except manifests of checkpoints that are based on deleted files: the chains of a
    checkpoint's files may have different bases after blocks have moved.

    Args:
        names: Names of all files.
        latest: The checkpoint named by the stored pointer.
        keep: Number of newest checkpoints to keep; at least 1.
        keep_every: Divisor of the numbers to keep permanently; None for none.
        rejected: Checkpoints that could not be loaded, which are not counted.
    """
    complete = [number for number in candidates(names) if number <= latest and number not in rejected]
    if latest not in complete:
        # The checkpoint that the pointer names is missing, so nothing is deleted.
        return ()
    kept = complete[:keep]
    #: (number of the checkpoint that contains a chain's base, number of one that contains an increment of that chain)
    chains = [(since, number) for name in names if (since := since_of(name)) and (number := number_of(name))]
    floor = min([kept[-1], *(since for since, number in chains if number in kept)])
    lasting = {number for number in complete if keep_every and number % keep_every == 0}
    # Checkpoints kept by ``keep_every`` may contain increments if that setting was changed after they were written.
    lasting |= {older for since, number in chains if number in lasting for older in range(since, number)}
    incomplete = {manifest_name(number) for since, number in chains if since < floor <= number}
    going = [
        name
        for name in names
        if (number := number_of(name)) is not None and (number < floor or name in incomplete) and number not in lasting
    ]
    return tuple(sorted(going, key=lambda name: (_MANIFEST.fullmatch(name) is None, number_of(name), name)))
