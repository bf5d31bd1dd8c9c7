"""Refuses to use Flight in a forked child: gRPC's threads do not exist there, and the first call would hang for ever.

A process that made a server or a client must start children with the *spawn* method. The guard cannot prevent a fork,
and it cannot repair the parent; it turns the child's silent hang into one clear error. Children of ``subprocess`` are
not forks in this sense (they execute another program at once) and are not affected.

A child that is forked all the same must not run the destructors of inherited servers and clients, nor pyarrow's
finalizers of servers at exit, which would hang, too: the guard keeps one reference of each and detaches the finalizers.
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
    """Knows whether Flight was used before this process was forked. One per process is enough."""

    __slots__ = ("_is_forked", "_used")

    def __init__(self) -> None:
        #: Servers and clients alive in this process.
        self._used: weakref.WeakSet[object] = weakref.WeakSet()
        self._is_forked = False
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    def register(self, user: object) -> None:
        """Note a server or client of pyarrow, which has threads of gRPC."""
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
