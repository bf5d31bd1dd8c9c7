"""A pserver's handling of views. A view determines the blocks' mode, and the members for which the blocks wait.

``membership`` describes the rules. A pserver accepts a view only if the view is newer than its current one. It
immediately removes members that are missing from the view, admits a new member only if none of the rounds in which that
member would be due has closed, and changes the mode only if no block has passed the switch round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flightedl.domain.consistency.modes import Mode
from flightedl.errors import MessageError
from flightedl.messages.control import ViewMember, ViewReply, ViewRequest


def mode_of(view: ViewRequest) -> Mode | None:
    """Return the mode of a view, or None. Raises UsageError if the mode is unknown."""
    return None if view.mode is None else Mode.from_json(view.mode)


@dataclass(frozen=True, slots=True)
class ViewVerdict:
    """The changes that a view requires. Apply them to all blocks, then answer the master."""

    #: True if the view is older than the pserver's current one, and is therefore ignored.
    is_outdated: bool
    admit: tuple[ViewMember, ...] = ()
    remove: tuple[int, ...] = ()
    #: Ids of the members that were not admitted.
    refused: tuple[int, ...] = ()
    #: New mode, which begins at ``switch_round``: remove all members, change the mode, admit the new members. Or None.
    switch: Mode | None = None
    switch_round: int = 0
    #: True if the mode could not be changed at the view's switch round.
    refuses_mode: bool = False

    @property
    def accepted(self) -> bool:
        return not self.is_outdated and not self.refused and not self.refuses_mode

    def reply(self, serial: int, highest_open_round: int) -> ViewReply:
        return ViewReply(
            serial=serial,
            refused=list(self.refused),
            highest_open_round=highest_open_round,
            outdated=self.is_outdated,
            refuses_mode=self.refuses_mode,
        )


class PserverView:
    """The members, which are the same for all blocks of a pserver. The caller holds all blocks' locks during a change.

    Args:
        mode: Initial mode of the blocks; None if views must not change it.
    """

    def __init__(self, mode: Mode | None = None) -> None:
        self._mode = mode
        self._refuses_mode = False
        self._master_generation = 0
        self._serial = 0
        self._members: dict[int, ViewMember] = {}
        #: Members of the newest view that could not be admitted.
        self._refused: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[ViewMember, ...]:
        return tuple(self._members.values())

    @property
    def number(self) -> tuple[int, int]:
        return self._master_generation, self._serial

    def begins_in(self, view: ViewRequest) -> Mode | None:
        """Return the mode to set in all blocks before ``consider``, or None. Only the first view can require this."""
        mode = mode_of(view)
        if self.number != (0, 0) or self._mode is None or mode in {None, self._mode}:
            return None
        self._mode = mode
        return mode

    def consider(
        self, view: ViewRequest, can_admit: Callable[[int], bool], can_switch: Callable[[int], bool] = lambda _: True
    ) -> ViewVerdict:
        """Adopt as much of a view as possible. The caller carries out the verdict before it releases the locks.

        A repeated view gets the same verdict as before but changes nothing.

        Args:
            view: The view from the master.
            can_admit: True for a round at which every block can begin to wait for a member.
            can_switch: True for a round at which every block can change its mode.

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
            raise MessageError("a view contains a member twice")
        for member_id, member in wanted.items():
            if self._members.get(member_id, member) != member:
                raise MessageError(f"member {member_id} differs from that of the previous view")
        mode = mode_of(view)
        switch = mode if self._mode is not None and mode not in {None, self._mode} else None
        self._refuses_mode = switch is not None and not can_switch(view.switch_round)
        if switch is not None:
            return self._change_mode(number, view, switch)
        new = [member for member_id, member in wanted.items() if member_id not in self._members]
        admit = tuple(member for member in new if can_admit(member.first_round))
        refused = tuple(member.member for member in new if member not in admit)
        remove = tuple(member_id for member_id in self._members if member_id not in wanted)
        self._apply(number, admit, remove, refused)
        return ViewVerdict(is_outdated=False, admit=admit, remove=remove, refused=refused)

    def _change_mode(self, number: tuple[int, int], view: ViewRequest, mode: Mode) -> ViewVerdict:
        """If no block has passed the switch round, replace all members and change the mode as the view requires."""
        remove = tuple(self._members)
        if self._refuses_mode:
            refused = tuple(member.member for member in view.members)
            self._apply(number, (), remove, refused)
            return ViewVerdict(is_outdated=False, remove=remove, refused=refused, refuses_mode=True)
        self._mode = mode
        admit = tuple(member for member in view.members if member.first_round >= view.switch_round)
        refused = tuple(member.member for member in view.members if member not in admit)
        self._apply(number, admit, remove, refused)
        return ViewVerdict(False, admit, remove, refused, mode, view.switch_round)

    def _apply(
        self, number: tuple[int, int], admit: Sequence[ViewMember], remove: Iterable[int], refused: tuple[int, ...]
    ) -> None:
        self._master_generation, self._serial = number
        self._refused = refused
        for member_id in remove:
            del self._members[member_id]
        self._members.update((member.member, member) for member in admit)
