"""What a pserver makes of the views that the master sends it: whom its blocks wait for, and in which mode.

The rules are those of ``membership``: a pserver takes only a view that is newer than the one it has, removes at once
whom the view does not name, admits a new member only where none of its rounds has gone by, and changes the mode only
where no block is past the round of the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flightedl.domain.consistency.modes import Mode
from flightedl.errors import MessageError
from flightedl.messages.control import ViewMember, ViewReply, ViewRequest


def mode_of(view: ViewRequest) -> Mode | None:
    """Return the mode that a view names; UsageError: it is none of ours."""
    return None if view.mode is None else Mode.from_json(view.mode)


@dataclass(frozen=True, slots=True)
class ViewVerdict:
    """What a view asks of a pserver's blocks: change all of them by ``admit`` and ``remove``, then answer."""

    #: The view is older than the one known: nothing is to be done.
    is_outdated: bool
    admit: tuple[ViewMember, ...] = ()
    remove: tuple[int, ...] = ()
    #: Member ids that could not be admitted.
    refused: tuple[int, ...] = ()
    #: Remove, then change to this mode at ``switch_round``, then admit.
    switch: Mode | None = None
    switch_round: int = 0
    #: The mode could not be changed at the round of the view.
    refuses_mode: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the pserver now has exactly the members of the view."""
        return not self.is_outdated and not self.refused and not self.refuses_mode

    def reply(self, serial: int, highest_open_round: int) -> ViewReply:
        """What the master is told, once the verdict is carried out."""
        return ViewReply(
            serial=serial,
            refused=list(self.refused),
            highest_open_round=highest_open_round,
            outdated=self.is_outdated,
            refuses_mode=self.refuses_mode,
        )


class PserverView:
    """The members that all blocks of one pserver have. The caller holds the locks of all blocks around a change.

    Args:
        mode: That the blocks begin with; None: views never change it.
    """

    def __init__(self, mode: Mode | None = None) -> None:
        self._mode = mode
        self._refuses_mode = False
        self._master_generation = 0
        self._serial = 0
        self._members: dict[int, ViewMember] = {}
        #: By the newest view.
        self._refused: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[ViewMember, ...]:
        return tuple(self._members.values())

    @property
    def number(self) -> tuple[int, int]:
        """(master generation, serial) of the newest view."""
        return self._master_generation, self._serial

    def begins_in(self, view: ViewRequest) -> Mode | None:
        """The mode that blocks have to be given before ``consider``, because this is the first view; None: no other."""
        mode = mode_of(view)
        if self.number != (0, 0) or self._mode is None or mode in {None, self._mode}:
            return None
        self._mode = mode
        return mode

    def consider(
        self, view: ViewRequest, can_admit: Callable[[int], bool], can_switch: Callable[[int], bool] = lambda _: True
    ) -> ViewVerdict:
        """Take a view over, as far as possible; the caller carries the verdict out before it gives the locks back.

        The same view again gets the same verdict with nothing left to do.

        Args:
            view: What the master sent.
            can_admit: Whether every block could begin to wait for a member at this round.
            can_switch: Whether every block could change its mode at this round.

        Raises:
            MessageError: a member's first round has changed, or an id occurs twice; nothing was done.
        """
        number = (view.master_generation, view.serial)
        if number < self.number:
            return ViewVerdict(is_outdated=True)
        if number == self.number:
            return ViewVerdict(is_outdated=False, refused=self._refused, refuses_mode=self._refuses_mode)
        wanted = {member.member: member for member in view.members}
        if len(wanted) != len(view.members):
            raise MessageError("a view names a member twice")
        for member_id, member in wanted.items():
            if self._members.get(member_id, member) != member:
                raise MessageError(f"member {member_id} is another one than in the view before")
        mode = mode_of(view)
        switch = mode if self._mode is not None and mode not in {None, self._mode} else None
        self._refuses_mode = switch is not None and not can_switch(view.switch_round)
        if switch is not None:
            return self._change_mode(number, view, switch)
        new = [member for member_id, member in wanted.items() if member_id not in self._members]
        admit = tuple(member for member in new if can_admit(member.first_round))
        refused = tuple(member.member for member in new if member not in admit)
        remove = tuple(member_id for member_id in self._members if member_id not in wanted)
        self._take(number, admit, remove, refused)
        return ViewVerdict(is_outdated=False, admit=admit, remove=remove, refused=refused)

    def _change_mode(self, number: tuple[int, int], view: ViewRequest, mode: Mode) -> ViewVerdict:
        """Everybody goes, and begins anew in another mode, if that is possible at its round."""
        remove = tuple(self._members)
        if self._refuses_mode:
            refused = tuple(member.member for member in view.members)
            self._take(number, (), remove, refused)
            return ViewVerdict(is_outdated=False, remove=remove, refused=refused, refuses_mode=True)
        self._mode = mode
        admit = tuple(member for member in view.members if member.first_round >= view.switch_round)
        refused = tuple(member.member for member in view.members if member not in admit)
        self._take(number, admit, remove, refused)
        return ViewVerdict(False, admit, remove, refused, mode, view.switch_round)

    def _take(
        self, number: tuple[int, int], admit: Sequence[ViewMember], remove: Iterable[int], refused: tuple[int, ...]
    ) -> None:
        self._master_generation, self._serial = number
        self._refused = refused
        for member_id in remove:
            del self._members[member_id]
        self._members.update((member.member, member) for member in admit)
