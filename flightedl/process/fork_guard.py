"""Prevent a forked child from using Flight. The child lacks gRPC's threads, so its first call would hang forever.

A process that has created a Flight server or client must start its children with the *spawn* method. The guard can
neither prevent a fork nor repair the parent, but it replaces the child's silent hang with a clear error. Children
started by ``subprocess`` are not affected, because they immediately execute another program.

In a forked child, the destructors of inherited servers and clients, and pyarrow's finalizers for servers, would hang,
too. Therefore the guard keeps a reference to each of these objects, and detaches the finalizers.
"""

from __future__ import annotations

import ctypes
import os
import weakref

from flightedl.errors import UsageError

_MESSAGE = (
    "this process was forked from one that already uses Arrow Flight, which cannot work: "
    "start child processes with multiprocessing.get_context('spawn')"
)


class ForkGuard:
    """Records whether Flight was used before this process was forked. There is one guard per process."""

    __slots__ = ("_is_forked", "_used")

    def __init__(self) -> None:
        #: Flight servers and clients that are alive in this process.
        self._used: weakref.WeakSet[object] = weakref.WeakSet()
        self._is_forked = False
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    def register(self, user: object) -> None:
        self._used.add(user)

    def check(self) -> None:
        """Raise UsageError if this process was forked after Flight had been used."""
        if self._is_forked:
            raise UsageError(_MESSAGE)

    def _after_fork_in_child(self) -> None:
        for user in list(self._used):
            self._is_forked = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(user))
            for reference in weakref.getweakrefs(user):
                finalizer = reference.__callback__
                if isinstance(finalizer, weakref.finalize):
                    finalizer.detach()


GUARD = ForkGuard()
