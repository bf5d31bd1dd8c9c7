"""The election of first values: exactly one trainer's values become the model's first ones.

The winner holds the election's key on its lease while it uploads to every pserver, then overwrites the key without a
lease and with ``done``, in one transaction that names its election and the processes of the pservers that have its
values. A winner that dies leaves no key, and another one wins; its upload, of a newer election, replaces whatever the
first had sent. Losers wait for ``done``. A winner that was overtaken while it was frozen or cut off becomes a loser:
its upload is over, and it looks at the election again.

An election is known by the revision at which its key was created, so a newer one is above an older one.

From then on a trainer works for the model of this election (:class:`FollowedElection`), and no other: where the model
begins again from new first values, the trainer has to start again, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from flightedl.domain.retries import is_transient
from flightedl.errors import BegunAnewError, FlightedlError


@dataclass(frozen=True, slots=True)
class Candidate:
    """The election's key, as it was read."""

    trainer: str
    #: All pservers have its values.
    is_done: bool
    #: The revisions at which the key was created and changed last.
    created: int
    modified: int


@dataclass(frozen=True, slots=True)
class Look:
    """Read the election's key in etcd itself; then ``looked``."""


@dataclass(frozen=True, slots=True)
class Stand:
    """Create the key on this trainer's lease, if there is none; then ``stood``."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Send the values of a pserver's blocks; then ``uploaded``."""

    index: int
    election: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """Store that the election is done, if its key and these processes are still there; then ``confirmed``."""

    election: int
    #: By index: the generation of the process that has the values.
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait until the key is another one, or a while; then ask for the next step."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Pause:
    """Something did not succeed: wait a moment, then ask for the next step."""

    why: str


@dataclass(frozen=True, slots=True)
class Elected:
    """The model has its first values, of this election."""

    election: int
    #: The key has said so since this revision.
    since: int


Step = Look | Stand | Upload | Confirm | WaitFor | Pause | Elected
_LOOK = Look()


class ElectionOfFirstValues:
    """One trainer's part. Ask for the ``next_step``, carry it out, and say what came of it, or that it ``failed``.

    Args:
        trainer: Its id.
        pserver_count: To so many the values are sent.
    """

    def __init__(self, trainer: str, pserver_count: int) -> None:
        self._trainer = trainer
        self._pserver_count = pserver_count
        self._step: Step = _LOOK
        self._pause = ""
        self._has_stood = False
        #: Of the pservers that have the values of the present upload.
        self._generations: list[int] = []

    def next_step(self, newest: int = 0) -> Step:
        """What to do now.

        Args:
            newest: The newest election that this trainer has heard of in whatever way.
        """
        if self._pause:
            why, self._pause = self._pause, ""
            return Pause(why)
        step = self._step
        if isinstance(step, Upload) and newest > step.election:
            self._look_again("another trainer gives the first values")
            return self.next_step()
        if isinstance(step, WaitFor):
            self._step = _LOOK
        return step

    def looked(self, found: Candidate | None) -> None:
        """This is the key; None: there is none."""
        if found is None:
            if self._has_stood:
                self._look_again("the trainer that stood for the election of the first values is gone already")
            else:
                self._step = Stand()
        elif found.is_done:
            self._step = Elected(found.created, found.modified)
        elif found.trainer == self._trainer:
            self._upload(found.created)
        else:
            self._step = WaitFor(found)
        self._has_stood = False

    def stood(self) -> None:
        """There was a key already, or it was created, or this trainer's lease has ended."""
        self._has_stood = True
        self._step = _LOOK

    def _upload(self, election: int) -> None:
        self._generations = []
        self._step = Upload(0, election)

    def uploaded(self, generation: int, initialized: int, blocks: int) -> None:
        """A pserver's process has taken the values; so many of its blocks have values of this election."""
        step = self._step
        assert isinstance(step, Upload), "nothing was to be sent"
        if initialized != blocks:
            self._look_again("a pserver has values of a newer election")
            return
        self._generations.append(generation)
        if len(self._generations) < self._pserver_count:
            self._step = Upload(step.index + 1, step.election)
        else:
            self._step = Confirm(step.election, tuple(self._generations))

    def confirmed(self, revision: int | None) -> None:
        """It is stored, at this revision; None: the key or one of the processes was gone."""
        step = self._step
        assert isinstance(step, Confirm), "nothing was to be stored"
        if revision is None:
            # A pserver that dies between its upload and the end takes its values along: then all is sent again.
            self._look_again("a pserver was replaced while the first values were sent")
        else:
            self._step = Elected(step.election, revision)

    def failed(self, error: FlightedlError) -> None:
        """The step was not carried out, or it is not known whether it was.

        Raises:
            FlightedlError: it, where trying again cannot help.
        """
        if not is_transient(error):
            raise error
        self._pause = str(error) or type(error).__name__
        if not isinstance(self._step, Upload):
            self._step = _LOOK

    def _look_again(self, why: str) -> None:
        self._pause, self._step = why, _LOOK


class FollowedElection:
    """The election whose model a trainer works for.

    Args:
        elected: How it ended.
    """

    def __init__(self, elected: Elected) -> None:
        self._elected = elected

    @property
    def life(self) -> int:
        """Number of the model's life; see ``domain.recovery.lives``."""
        return self._elected.election

    def require_same(self, election: int | None, revision: int) -> None:
        """Go on only while the model is that of this election.

        Args:
            election: Of the key, as far as it is known here; None: there is no key.
            revision: Up to which etcd's keys are known here.

        Raises:
            BegunAnewError: the model has other first values, or is about to get them.
        """
        if election is None and revision < self._elected.since:
            return
        if election is None or election > self._elected.election:
            raise BegunAnewError(
                "the model begins anew, because a pserver died before there was a checkpoint: start this trainer again"
            )
