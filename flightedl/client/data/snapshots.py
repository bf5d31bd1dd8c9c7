"""List the files in a snapshot of a Delta or Iceberg table, for use with ``job.dataset``.

The caller must always name the snapshot: all trainers of a job must declare the same files, but a trainer that joined
later would find a newer snapshot. A snapshot is rejected if rows were deleted from it without rewriting their files,
because the files still contain the deleted rows.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flightedl.errors import DataError, UsageError
from flightedl.formats.sources import reason
from flightedl.process.importing import require

if TYPE_CHECKING:
    from pyiceberg.table import Table

_DELETED = (
    "{what} has rows that were deleted without rewriting their file ({file}): compact it, and declare the newer {kind}"
)


def delta_files(url: str | os.PathLike[str], *, version: int) -> list[str]:
    """Return the files of one version of a Delta table.

    Args:
        url: The table's directory.
        version: Number of the version.

    Raises:
        UsageError: the package deltalake is missing, or the version is not an integer.
        DataError: the table or version does not exist, or the version has deletion vectors.
    """
    require("deltalake", "a Delta table", "delta")
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    path = os.fspath(url)
    if not isinstance(version, int) or isinstance(version, bool):
        raise UsageError(f"version is {version!r:.80}, but must be a whole number: all trainers need the same version")
    try:
        table = DeltaTable(path, version=version)
        deleted = table.deletion_vectors().read_all()
    except DeltaError as error:
        raise DataError(f"version {version} of the Delta table {path} cannot be read: {reason(error)}") from None
    if deleted.num_rows:
        what = f"version {version} of the Delta table {path}"
        raise DataError(_DELETED.format(what=what, file=deleted["filepath"][0].as_py(), kind="version"))
    return sorted(table.file_uris())


def iceberg_files(table: Table, *, snapshot_id: int) -> list[str]:
    """Return the files of one snapshot of an Iceberg table.

    Args:
        table: The table, as returned by a catalog of pyiceberg.
        snapshot_id: Id of the snapshot.

    Raises:
        DataError: the snapshot does not exist, or it has delete files.
    """
    name = ".".join(table.name())
    if table.snapshot_by_id(snapshot_id) is None:
        now: Any = table.current_snapshot()
        newest = "it has none" if now is None else f"the newest one is {now.snapshot_id}"
        raise DataError(f"the Iceberg table {name} has no snapshot {snapshot_id!r:.80}: {newest}")
    files = []
    for task in table.scan(snapshot_id=snapshot_id).plan_files():
        if task.delete_files:
            what = f"snapshot {snapshot_id} of the Iceberg table {name}"
            raise DataError(_DELETED.format(what=what, file=task.file.file_path, kind="snapshot"))
        files.append(task.file.file_path)
    return sorted(files)
