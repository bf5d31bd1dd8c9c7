"""Tenure of a leased key: how long its holder may act, and when it renews the lease.

Rules:

* The holder stops by itself before others may start: it considers the key lost if its last successful renewal was
  *sent* more than two thirds of the time to live ago. A process that was frozen thus finds its key lost as soon as it
  looks, before it has contacted etcd.
* The holder renews the lease six times per time to live. When an etcd outage begins, the last renewal is thus at most a
  sixth of the time to live old, so no holder loses its key in an outage of half a time to live.
* A lost key is lost permanently.
"""

from __future__ import annotations

from dataclasses import dataclass

from flightedl.marks import sometimes

RENEWALS_PER_TTL = 6
#: Fraction of the time to live after which a key that was not renewed is considered lost.
TRUSTED_PART = 2 / 3
_RETRIES_PER_TTL = 20


@dataclass(slots=True)
class Tenure:
    """Tenure of one key."""

    key: str
    ttl_s: float
    #: Time at which the last successful renewal was sent, or the grant if there was no renewal yet.
    renewed_at: float
    #: Why the key was lost; empty while it is held. Once set, it is never cleared.
    lost_because: str = ""

    def left_s(self, now: float) -> float:
        """Return for how many seconds the holder may act if no further renewal succeeds; 0 if the key is lost."""
        left_s = self.renewed_at + self.ttl_s * TRUSTED_PART - now
        if left_s <= 0:
            self.lose(f"the lease of {self.key} was not renewed for {now - self.renewed_at:.1f} s")
        return 0.0 if self.lost_because else left_s

    def lose(self, reason: str) -> str:
        """End the tenure. Return the first reason given for ending it."""
        if not self.lost_because:
            sometimes("a process gave up its lease")
        self.lost_because = self.lost_because or reason
        return self.lost_because

    def renewed(self, sent_at: float, now: float) -> None:
        """Record a successful renewal. Ignored if the key is already lost."""
        if self.left_s(now):
            self.renewed_at = sent_at

    def pause_s(self, now: float, *, is_troubled: bool) -> float:
        """Return the seconds until the next renewal or until the key would be lost, whichever comes first."""
        wanted_s = self.ttl_s / _RETRIES_PER_TTL
        if not is_troubled:
            wanted_s = self.renewed_at + self.ttl_s / RENEWALS_PER_TTL - now
        return max(0.0, min(wanted_s, self.left_s(now)))
