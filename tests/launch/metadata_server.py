"""A metadata service over HTTP that is as strict as those of the clouds."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MACHINE = "worker_3"
_TOKEN = "token-1=="
_AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class MetadataServer(ThreadingHTTPServer):
    """Answers the requests of one cloud, first without a notice."""

    daemon_threads = True

    def __init__(self, cloud: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cloud = cloud
        root = "/computeMetadata/v1/instance"
        #: Path -> document.
        self.documents: dict[str, str] = {
            "aws": {},
            "gcp": {f"{root}/preempted": "FALSE", f"{root}/maintenance-event": "NONE"},
            "azure": {_AZURE_NAME: MACHINE, _AZURE_EVENTS: '{"DocumentIncarnation": 1, "Events": []}'},
        }[cloud]
        #: Bodies of POST requests, and the number of documents read.
        self.posted: list[dict[str, Any]] = []
        self.reads = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self) -> dict[str, str]:
        """Return variables that make a process watch this service."""
        return {"FLIGHTEDL_NOTICE": self.cloud, "FLIGHTEDL_NOTICE_URL": self.url}

    def announce(self) -> None:
        """Announce the end of the machine."""
        if self.cloud == "aws":
            notice = {"action": "terminate", "time": "2026-11-26T08:22:00Z"}
            self.documents["/latest/meta-data/spot/instance-action"] = json.dumps(notice)
        elif self.cloud == "gcp":
            self.documents["/computeMetadata/v1/instance/preempted"] = "TRUE"
        else:
            event = {"EventId": "f020ba2e", "EventType": "Preempt", "ResourceType": "VirtualMachine"}
            event |= {"Resources": [MACHINE], "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Sep 2026 18:29:47 GMT"}
            document = {"DocumentIncarnation": 2, "Events": [event | {"Description": "", "DurationInSeconds": -1}]}
            self.documents[_AZURE_EVENTS] = json.dumps(document)


class _Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_PUT(self) -> None:
        ttl_s = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")
        is_good = self.server.cloud == "aws" and self.path == "/latest/api/token" and 1 <= int(ttl_s) <= 21600
        self._reply(*((200, _TOKEN) if is_good else (400, "")))

    def do_GET(self) -> None:
        name, value, refusal = {
            "aws": ("X-aws-ec2-metadata-token", _TOKEN, 401),
            "gcp": ("Metadata-Flavor", "Google", 403),
            "azure": ("Metadata", "true", 400),
        }[self.server.cloud]
        found = self.server.documents.get(self.path)
        if self.headers.get(name) != value:
            self._reply(refusal, "")
        else:
            self.server.reads += 1
            self._reply(*((404, "not found") if found is None else (200, found)))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_good = self.path == _AZURE_EVENTS and self.headers.get("Metadata") == "true"
        if is_good:
            self.server.posted.append(json.loads(body))
        self._reply(200 if is_good else 400, "")

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Write no log."""


@contextlib.contextmanager
def metadata_server(cloud: str) -> Iterator[MetadataServer]:
    """Serve the metadata of a cloud during the ``with`` block."""
    with MetadataServer(cloud) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
