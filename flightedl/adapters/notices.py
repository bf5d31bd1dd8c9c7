"""Watch for notices that this machine is about to end. A notice has the effect of SIGTERM on this process.

A daemon thread asks the cloud's metadata service or the Kubernetes API, immediately and then every few seconds. So a
process that is restarted on such a machine ends again, usually before it takes part in the job. If the source does not
answer, the thread says so once and keeps asking.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from flightedl.adapters.kubectl import Kubectl
from flightedl.config import CommonSettings
from flightedl.domain.notices import MetadataRequest, Notice, identification, notice_in, notice_of_node, questions
from flightedl.errors import UnavailableError
from flightedl.ports import Cluster

_TIMEOUT_S = 2.0
#: Seconds between two looks, of which one at a node starts a process.
_EVERY_S = 2.0
_NODE_EVERY_S = 10.0


class MetadataService:
    """The metadata service of a cloud."""

    def __init__(self, cloud: str, url: str) -> None:
        self._cloud = cloud
        self._address = urlsplit(url).netloc

    def look(self) -> Notice | None:
        """Return the current notice, if any. Raises UnavailableError if there is none and an answer is missing."""
        first, trouble = identification(self._cloud), None
        identity = "" if first is None else self._answer(first)
        answers = []
        for question in questions(self._cloud, identity):
            try:
                answers.append(self._answer(question))
            except UnavailableError as error:
                answers.append("")
                trouble = error
        try:
            notice = notice_in(self._cloud, identity, answers)
        except ValueError as error:
            raise UnavailableError(f"the metadata service gave an unknown answer: {error}") from None
        if notice is None and trouble is not None:
            raise trouble
        return notice

    def acknowledge(self, notice: Notice) -> None:
        """Tell the cloud that the machine may end now, if it waits for that. Raises UnavailableError on failure."""
        if notice.acknowledgement is not None:
            self._answer(notice.acknowledgement)

    def _answer(self, request: MetadataRequest) -> str:
        """Send a request, never through a proxy. Return the answer; empty if there is no such document."""
        # Imported lazily: few processes watch for notices.
        import http.client

        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            try:
                connection.request(request.method, request.path, request.body or None, request.headers)
                answer = connection.getresponse()
                text = answer.read().decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                raise UnavailableError(f"the metadata service does not answer: {error!r}") from None
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return ""
        if answer.status != http.HTTPStatus.OK:
            raise UnavailableError(f"the metadata service answered {answer.status} {answer.reason}")
        return text


def node_notice(cluster: Cluster, node: str) -> Notice | None:
    """Return the notice in a node's taints, if any. Raises FlightedlError if the cluster does not show the node."""
    return notice_of_node(cluster.get("Node", node) or {})


class NoticeWatch:
    """A thread that sends SIGTERM to this process's main thread upon a notice.

    Args:
        look: Returns the current notice; raises FlightedlError if the source gives none.
        every_s: Seconds between two looks.
        say: Receives one sentence about a notice, and one about the first failure.
    """

    def __init__(self, look: Callable[[], Notice | None], every_s: float, say: Callable[[str], object]) -> None:
        self._look = look
        self._every_s = every_s
        self._say = say
        self._stop = threading.Event()
        #: The notice, once it has arrived.
        self.notice: Notice | None = None
        self._thread = threading.Thread(target=self._run, name="flightedl-notices", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        has_failed = False
        while not self._stop.is_set():
            try:
                self.notice = self._look()
            except Exception as error:  # noqa: BLE001 - an odd answer must not end the thread
                if not has_failed:
                    self._say(f"cannot see notices about the end of this machine; retrying: {error}")
                has_failed = True
            if self.notice is not None and not self._stop.is_set():
                self._say(f"this machine is about to end, as if by SIGTERM: {self.notice.reason}")
                main = threading.main_thread().ident
                assert main is not None, "it runs"
                signal.pthread_kill(main, signal.SIGTERM)
                return
            self._stop.wait(self._every_s)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(_TIMEOUT_S)


@contextlib.contextmanager
def watched(chosen: CommonSettings, say: Callable[[str], object], *, acknowledges: bool = False) -> Iterator[None]:
    """Turn notices into SIGTERM during the ``with`` block, if the settings name a source.

    Args:
        chosen: Settings of this process.
        say: Receives sentences for the user, from another thread.
        acknowledges: True to tell the cloud after the block that the machine may end. Only for a process that stops
            everything of the job on this machine.
    """
    if not chosen.notice:
        yield
        return
    if chosen.notice == "kubernetes":
        cluster = Kubectl()
        watch = NoticeWatch(lambda: node_notice(cluster, chosen.node), _NODE_EVERY_S, say)
        service = None
    else:
        service = MetadataService(chosen.notice, chosen.notice_url)
        watch = NoticeWatch(service.look, _EVERY_S, say)
    try:
        yield
    finally:
        watch.close()
        if acknowledges and service is not None and watch.notice is not None:
            with contextlib.suppress(UnavailableError):
                service.acknowledge(watch.notice)
