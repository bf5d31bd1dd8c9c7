"""Tenure of a leased key: for how long its holder may act under it, and when it renews the lease.

Rules:

* The holder stops by itself before others may start: it counts the key as lost when its last successful renewal was
  *sent* more than two thirds of the granted time to live ago. A process that was frozen finds its key lost at its first
  look, before it has contacted etcd.
* It renews six times in a time to live. The last renewal was then sent at most a sixth of the time to live ago, so an
  outage of etcd of up to half a time to live demotes no process, whenever it begins.
* A lost key stays lost.
"""

from __future__ import annotations

from dataclasses import dataclass

RENEWALS_PER_TTL = 6
#: Part of the time to live after which an unrenewed key counts as lost.
TRUSTED_PART = 2 / 3
_RETRIES_PER_TTL = 20


@dataclass(slots=True)
class Tenure:
    """Tenure of one key."""

    key: str
    ttl_s: float
    #: Time at which the last successful renewal (first: the grant) was sent.
    renewed_at: float
    #: Reason of the loss; empty while the key is held. Once set, it is never cleared.
    lost_because: str = ""

    def left_s(self, now: float) -> float:
        """Return the seconds for which the holder may act if no further renewal succeeds. 0 if the key is lost."""
        left_s = self.renewed_at + self.ttl_s * TRUSTED_PART - now
        if left_s <= 0:
            self.lose(f"the lease of {self.key} was not renewed for {now - self.renewed_at:.1f} s")
        return 0.0 if self.lost_because else left_s

    def lose(self, reason: str) -> str:
        """End the tenure, and return the first reason."""
        self.lost_because = self.lost_because or reason
        return self.lost_because

    def renewed(self, sent_at: float, now: float) -> None:
        """Record a successful renewal. It has no effect if the key is already lost."""
        if self.left_s(now):
            self.renewed_at = sent_at

    def pause_s(self, now: float, *, is_troubled: bool) -> float:
        """Return the seconds until the next renewal, at most until the key counts as lost."""
        wanted_s = self.ttl_s / _RETRIES_PER_TTL
        if not is_troubled:
            wanted_s = self.renewed_at + self.ttl_s / RENEWALS_PER_TTL - now
        return max(0.0, min(wanted_s, self.left_s(now)))
