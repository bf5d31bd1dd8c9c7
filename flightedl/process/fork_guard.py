"""Prevent a forked child from using Flight or a session. It lacks their threads, so a call would hang forever.

A process that has created a Flight server or client must start its children with the *spawn* method. The guard can
neither prevent a fork nor repair the parent, but it replaces the child's silent hang with a clear error. Children
started by ``subprocess`` are not affected, because they immediately execute another program.

A session or a cluster belongs to the process that opened it. A forked child can read values that are already there, but
every method that sends, waits or claims calls ``check``, before it takes a lock that a thread of the parent may have
held. Methods that end a session or a cluster do nothing in the child. The child ends without the interpreter's final
steps, which would wait for the parent's threads.

In a forked child, the destructors of inherited servers and clients, and pyarrow's finalizers for servers, would hang,
too. Therefore the guard keeps a reference to each of these objects, and detaches the finalizers.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref

from flightedl.errors import UsageError, exit_code_of
from flightedl.process.ending import end_at_once, script_error, watch_exits

_MESSAGE = (
    "this process was forked from one that already uses Arrow Flight, which cannot work, and a session belongs to the "
    "process that opened it: use it there, or start child processes with multiprocessing.get_context('spawn')"
)


class ForkGuard:
    """Records whether Flight or a session was in use when this process was forked. There is one guard per process."""

    __slots__ = ("_used", "is_forked")

    def __init__(self) -> None:
        #: Flight servers and clients, sessions and clusters that are alive in this process.
        self._used: weakref.WeakSet[object] = weakref.WeakSet()
        #: True if this process is a child that was forked while any of them was alive.
        self.is_forked = False
        os.register_at_fork(after_in_child=self._after_fork_in_child)
        # Registered first, so it runs after all other exit functions.
        atexit.register(self._end_child)

    def register(self, user: object) -> None:
        self._used.add(user)

    def forget(self, user: object) -> None:
        """Record that a session or a cluster has ended, so that children may be forked again."""
        self._used.discard(user)

    def check(self) -> None:
        """Raise UsageError if this process was forked while Flight or a session was in use."""
        if self.is_forked:
            raise UsageError(_MESSAGE)

    def _end_child(self) -> None:
        if self.is_forked:
            end_at_once(exit_code_of(script_error(is_over=True)))

    def _after_fork_in_child(self) -> None:
        for user in list(self._used):
            self.is_forked = True
            watch_exits()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(user))
            for reference in weakref.getweakrefs(user):
                finalizer = reference.__callback__
                if isinstance(finalizer, weakref.finalize):
                    finalizer.detach()


GUARD = ForkGuard()
