"""Prevents the use of Flight in a forked child. The child lacks gRPC's threads, so its first call would hang forever.

A process that created a server or a client must start children with the *spawn* method. The guard cannot prevent a
fork, and it cannot repair the parent; it turns the child's silent hang into a clear error. Children of ``subprocess``
are not affected, because they immediately execute another program.

Destructors of inherited servers and clients, and pyarrow's finalizers for servers, would also hang in a forked child.
So the guard keeps a reference to each object and detaches the finalizers.
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
    """Records whether Flight was used before this process was forked. One guard per process suffices."""

    __slots__ = ("_is_forked", "_used")

    def __init__(self) -> None:
        #: Servers and clients alive in this process.
        self._used: weakref.WeakSet[object] = weakref.WeakSet()
        self._is_forked = False
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    def register(self, user: object) -> None:
        """Register a server or client of pyarrow, which has gRPC threads."""
        self._used.add(user)

    def check(self) -> None:
        """Raise UsageError in a process that was forked after Flight was first used."""
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
