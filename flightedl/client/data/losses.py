"""Report on data that was set aside, at the end of a loop."""

from __future__ import annotations

import sys

import msgspec

from flightedl.errors import LostDataError


class LostData(msgspec.Struct, frozen=True):
    """Records that no trainer has trained on, although the data is over."""

    #: Numbers over all epochs. The ranks of a group leave out records, not batches.
    records: int = 0
    batches: int = 0
    #: Files, records and errors, for users.
    places: tuple[str, ...] = ()
    #: Number of chunks whose records a task mixes, as a mean; 0 if ``shuffle=True`` has not drawn them.
    mixed_chunks: int = 0

    def report(self, *, may_lose: bool) -> None:
        """Raise LostDataError if records were lost. If they may be lost, only print the same sentence."""
        if not self.places:
            return
        batches = f"{self.batches:,} batches with " if self.batches else ""
        more = f"; and {len(self.places) - 8:,} more places" if len(self.places) > 8 else ""
        sentence = (
            f"the data is over, but {batches}{self.records:,} records were set aside and not trained on: "
            f"{'; '.join(self.places[:8])}{more}. Repair the cause and continue with --resume"
        )
        if not may_lose:
            raise LostDataError(f'{sentence}, or accept the loss with on_lost="continue" in job.dataset')
        sys.stderr.write(f"flightedl: {sentence}\n")
