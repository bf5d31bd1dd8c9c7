"""Protocol by which two processes share memory: rules for writing, and the state after a process has died.

Each process owns one memory per stream, and may lend from further memory. A process writes only to its own memory:

* **Values** of a message are written before the message is sent, to a range that no open message uses. The peer reads
  them between receiving the message and counting it as consumed.
* **The counter** ``consumed`` is increased after the last read of a message's values. The owner of the values then
  frees their range, as it also does when the message is answered. A wrong counter harms only its writer.
* **The flag** ``over`` is set when a stream ends with open messages, before any lent value changes. After its last read
  of lent values, the peer checks the flag, and discards the values if it is set.

A fence separates the reads of values from the counter or the flag, and the counter or the flag from later writes. With
sockets, everything before the sending of a message happens before everything after its receipt.

If a process dies, its memory keeps its content until the peer has also unmapped it. The effect depends on the moment:

* If the sender dies before it sends the message, the peer never learns about the values.
* If the sender dies after it has sent the message, the peer reads complete values, and then finds that the stream has
  ended.
* If the reader dies, its counter no longer rises, so the sender overwrites nothing until the stream has ended, and
  lends from other memory afterwards. A reader that was only frozen finds the flag when it continues.
"""

from __future__ import annotations


class Loans:
    """The sender's record of the messages whose values the receiver may still read."""

    __slots__ = ("is_over", "open", "seen")

    def __init__(self) -> None:
        #: Number of these messages.
        self.open = 0
        #: Number of messages that the receiver's counter has freed.
        self.seen = 0
        #: True if the stream has ended.
        self.is_over = False

    def lend(self) -> None:
        """Record a message that is about to be sent."""
        assert not self.is_over, "nothing is lent after the end of a stream"
        self.open += 1

    def counted(self, counter: int) -> int:
        """Return how many of the oldest messages the receiver's counter frees; they are no longer open."""
        news = max(0, min(counter - self.seen, self.open))
        self.seen += news
        self.open -= news
        return news

    def answered(self, count: int) -> int:
        """Return how many of the oldest messages ``count`` answers free; they are no longer open."""
        news = min(count, self.open)
        self.open -= news
        return news

    def end(self) -> None:
        """End all loans. The caller has set the flag."""
        self.open, self.is_over = 0, True
