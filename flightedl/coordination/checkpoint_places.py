"""Storage for a job's checkpoints and for exported models.

Checkpoints are stored at the URL in the servers' settings, in a directory named after the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flightedl.adapters.storage import open_storage
from flightedl.domain.checkpoint.manifest import Manifest
from flightedl.domain.checkpoint.restoring import saved_tables
from flightedl.domain.model.declared import parameters_of
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import CorruptError, UsageError
from flightedl.formats.checkpoint_files import load_parameters
from flightedl.formats.model_files import WRITERS, Parameters, format_of
from flightedl.messages.base import decode
from flightedl.messages.declarations import JobDeclaration
from flightedl.ports import Storage


def job_storage(url: str, job: str) -> Storage | None:
    """Return a job's storage, or None if it writes no checkpoints. Raises UsageError if the URL is unusable."""
    return open_storage(f"{url.rstrip('/')}/{job}") if url else None


def write_model(
    output: str,
    kind: str,
    specs: list[ParameterSpec],
    parameters: Parameters,
    require: Callable[[], None] = lambda: None,
) -> str:
    """Write parameters to one file, atomically. Return the file's URL without credentials.

    Args:
        output: Path or URL of the file.
        kind: "safetensors", "npz" or "arrow"; empty to derive it from the file's name.
        specs: Specs of the ``parameters``.
        parameters: Parameters with their values, consumed one at a time.
        require: Called before the file appears. If it raises an error, nothing has changed.

    Raises:
        UsageError: the format is unknown, or the URL is unusable.
        UnavailableError: the file could not be written.
    """
    return write_file(output, WRITERS[format_of(output, kind)](specs, parameters), require)


def write_file(output: str, parts: Iterable[bytes | memoryview], require: Callable[[], None] = lambda: None) -> str:
    """Write one file, atomically. Return its URL without credentials. See ``write_model``."""
    folder, _, file = output.rpartition("/")
    target = open_storage(folder or ("/" if output.startswith("/") else "."))
    target.publish(file, parts, require)
    return f"{target.url}/{file}"


def export_model(
    storage: Storage, manifest: Manifest, output: str, kind: str, require: Callable[[], None] = lambda: None
) -> str:
    """Write a checkpoint's parameters to one file. Return the file's URL. See ``write_model``.

    Raises:
        UsageError, UnavailableError: as for ``write_model``.
        CorruptError, NotFoundError: the checkpoint is damaged.
    """
    specs = specs_of(manifest)
    return write_model(output, kind, specs, load_parameters(storage, manifest, specs), require)


def export_table(
    storage: Storage,
    manifest: Manifest,
    name: str,
    output: str,
    *,
    has_slots: bool = False,
    require: Callable[[], None] = lambda: None,
) -> str:
    """Write the rows of a table in a checkpoint to a Parquet file. Return its URL. See ``write_model``.

    Raises:
        UsageError: the table is not in the checkpoint, or as for ``write_model``.
        UnavailableError: as for ``write_model``.
        CorruptError, NotFoundError: the checkpoint is damaged.
    """
    # Imported lazily: the Parquet writer is slow to import, and most jobs export no tables.
    from flightedl.formats.stored_tables import stored_rows
    from flightedl.formats.table_files import table_file

    number, spec = table_in(manifest, name)
    rows = stored_rows(storage, manifest, number, spec)
    return write_file(output, table_file(spec, rows, has_slots=has_slots), require)


def table_in(manifest: Manifest, name: str) -> tuple[int, TableSpec]:
    """Return the number and the declaration of a table. Raises UsageError if the checkpoint does not contain it."""
    tables = saved_tables(manifest)
    number = next((number for number, table in enumerate(tables) if table.name == name), None)
    if number is None:
        known = ", ".join(table.name for table in tables) or "none"
        raise UsageError(f"checkpoint {manifest.number} has no table {name!r}: there are {known}")
    return number, tables[number]


def specs_of(manifest: Manifest) -> list[ParameterSpec]:
    """Return the specs of a checkpoint's parameters. Raises CorruptError if it has no parameters."""
    declared = decode(manifest.declaration, JobDeclaration).model
    if declared is None:
        raise CorruptError(f"checkpoint {manifest.number} has no model")
    return parameters_of(declared.declaration)
