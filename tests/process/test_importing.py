"""Imports run without garbage collection, and restore the collector's state."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from flightedl.process.importing import without_collection


def test_collection_is_off_during_an_import_and_on_afterwards() -> None:
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_leaves_the_collector_enabled() -> None:
    with pytest.raises(ImportError), without_collection():
        raise ImportError
    assert gc.isenabled()


def test_loaded_objects_are_never_scanned_again() -> None:
    program = """
import gc
from flightedl.process.importing import of_a_server
before = gc.get_freeze_count()
with of_a_server():
    import json
print(gc.isenabled(), before, gc.get_freeze_count() > 1000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split() == ["True", "0", "True"]
