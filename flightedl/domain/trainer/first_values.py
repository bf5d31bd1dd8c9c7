"""Election of the trainer whose values become the model's initial values.

The winner holds the election's key on its lease while it sends its values to every pserver. It then overwrites the key
with ``done``, without a lease, in one transaction, provided that the key and the pserver processes with its values
still exist. Losers wait for ``done``.

If a winner dies, its key disappears and another trainer wins. The new winner's values belong to a newer election, so
they replace the earlier ones. A winner that was overtaken while it was frozen or disconnected becomes a loser: it stops
sending and reads the key again.

An election is identified by the revision at which its key was created, so newer elections have higher numbers.

After that, a trainer trains only the model of this election (:class:`FollowedElection`). If the model is initialized
again, the trainer must be restarted.
"""

from __future__ import annotations

from dataclasses import dataclass

from flightedl.domain.retries import is_transient
from flightedl.errors import BegunAnewError, FlightedlError
from flightedl.marks import sometimes


@dataclass(frozen=True, slots=True)
class Candidate:
    """The election's key, as read from etcd."""

    trainer: str
    #: True if all pservers have the winner's values.
    is_done: bool
    #: Revisions at which the key was created and last modified.
    created: int
    modified: int


@dataclass(frozen=True, slots=True)
class ReadKey:
    """Read the election's key from etcd, then call ``key_read``."""


@dataclass(frozen=True, slots=True)
class CreateKey:
    """Create the key on this trainer's lease unless it exists, then call ``creation_attempted``."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Send the values of a pserver's blocks, then call ``uploaded``."""

    index: int
    election: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """Mark the election as done if its key and these processes still exist, then call ``confirmed``."""

    election: int
    #: Index -> generation of the process that has the values.
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait until the key changes, but not for long, then request the next step."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for a moment after a failure, then request the next step."""

    why: str


@dataclass(frozen=True, slots=True)
class Elected:
    """The model has its initial values, from this election."""

    election: int
    #: Revision at which the key was marked as done.
    since: int


Step = ReadKey | CreateKey | Upload | Confirm | WaitFor | Pause | Elected
_READ_KEY = ReadKey()


class ElectionOfFirstValues:
    """One trainer's part in the election. Carry out ``next_step`` and report its outcome, or call ``failed``.

    Args:
        trainer: This trainer's id.
        pserver_count: Number of pservers to upload to.
    """

    def __init__(self, trainer: str, pserver_count: int) -> None:
        self._trainer = trainer
        self._pserver_count = pserver_count
        self._step: Step = _READ_KEY
        self._pause = ""
        self._has_tried = False
        #: Pserver -> generation of the process that has received the values.
        self._generations: list[int] = []

    def next_step(self, newest: int = 0) -> Step:
        """Return the next step.

        Args:
            newest: The newest election that this trainer has heard of from any source.
        """
        if self._pause:
            why, self._pause = self._pause, ""
            return Pause(why)
        step = self._step
        if isinstance(step, Upload) and newest > step.election:
            self._read_again("another trainer provides the initial values")
            return self.next_step()
        if isinstance(step, WaitFor):
            self._step = _READ_KEY
        return step

    def key_read(self, found: Candidate | None) -> None:
        """Handle the key that was read; None if it does not exist."""
        if found is None:
            if self._has_tried:
                self._read_again("the trainer that stood for the election of the initial values is already gone")
            else:
                self._step = CreateKey()
        elif found.is_done:
            self._step = Elected(found.created, found.modified)
        elif found.trainer == self._trainer:
            self._upload(found.created)
        else:
            self._step = WaitFor(found)
        self._has_tried = False

    def creation_attempted(self) -> None:
        """Record that the key was created, that it existed already, or that this trainer's lease has ended."""
        self._has_tried = True
        self._step = _READ_KEY

    def _upload(self, election: int) -> None:
        self._generations = []
        self._step = Upload(0, election)

    def uploaded(self, generation: int, initialized: int, blocks: int) -> None:
        """Record a pserver's answer to the values: ``initialized`` of its ``blocks`` have this election's values."""
        step = self._step
        assert isinstance(step, Upload), "no upload was in progress"
        if initialized != blocks:
            self._read_again("a pserver has values of a newer election")
            return
        self._generations.append(generation)
        if len(self._generations) < self._pserver_count:
            self._step = Upload(step.index + 1, step.election)
        else:
            self._step = Confirm(step.election, tuple(self._generations))

    def confirmed(self, revision: int | None) -> None:
        """Handle the outcome of storing ``done``: its revision, or None if the key or a process no longer existed."""
        step = self._step
        assert isinstance(step, Confirm), "no confirmation was in progress"
        if revision is None:
            # A pserver that dies after receiving the values loses them, so everything is sent again.
            self._read_again("a pserver was replaced while the initial values were being sent")
        else:
            self._step = Elected(step.election, revision)

    def failed(self, error: FlightedlError) -> None:
        """Handle a step that failed or has an unknown outcome.

        Raises:
            FlightedlError: ``error``, if a retry cannot help.
        """
        if not is_transient(error):
            raise error
        self._pause = str(error) or type(error).__name__
        if not isinstance(self._step, Upload):
            self._step = _READ_KEY

    def _read_again(self, why: str) -> None:
        sometimes("the election of first values began again")
        self._pause, self._step = why, _READ_KEY


class FollowedElection:
    """The election whose model a trainer trains.

    Args:
        elected: Its result.
    """

    def __init__(self, elected: Elected) -> None:
        self._elected = elected

    @property
    def life(self) -> int:
        return self._elected.election

    def require_same(self, election: int | None, revision: int) -> None:
        """Raise an error if a newer election has initialized the model.

        Args:
            election: Of the key, as far as known here; None if there is no key.
            revision: Revision up to which etcd's keys are known here.

        Raises:
            BegunAnewError: the model has other initial values, or is about to get them.
        """
        if election is None and revision < self._elected.since:
            return
        if election is None or election > self._elected.election:
            raise BegunAnewError(
                "the model is initialized again, because a pserver died before the first checkpoint: restart this "
                "trainer"
            )
