"""Places outside of a job that its pods use: where checkpoints go, and the ports of stores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from flightedl.errors import UsageError
from flightedl.launch.kubernetes.pods import Object
from flightedl.launch.kubernetes.views import component_of

_DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(?P<scheme>[a-z0-9+]+)://[^/?#]*?(:(?P<port>[0-9]{1,5}))?([/?#]|$)")


def ports_of(texts: Iterable[str]) -> set[int]:
    """Return the ports of all texts that are URLs of HTTP, or of another scheme with a port."""
    urls = filter(None, map(_URL.match, texts))
    return {int(url["port"] or _DEFAULT_PORTS.get(url["scheme"], 0)) for url in urls} - {0}


def require_common_place(checkpoint: str, objects: Sequence[Object]) -> None:
    """Check that checkpoints at a path would outlive the pods that write them.

    Raises:
        UsageError: a master or pserver has no volume at that path, or one that goes with its pod.
    """
    scheme, _, path = checkpoint.rpartition("://")
    if scheme not in {"", "file", "local", "memory"} or not checkpoint:
        return
    for each in objects:
        if each["kind"] == "Deployment" and component_of(each) in {"master", "pserver"}:
            spec = each["spec"]["template"]["spec"]
            lost = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
            kept = [
                mount["mountPath"]
                for mount in spec["containers"][0]["volumeMounts"]
                if mount["name"] not in lost and not mount.get("readOnly")
            ]
            if scheme == "memory" or not any(PurePosixPath(path).is_relative_to(mount) for mount in kept):
                raise UsageError(
                    f"checkpoints at {checkpoint} would be lost with each pod: name a store, such as s3://bucket/name, "
                    "or a path on a volume of all masters and pservers (--volume CLAIM:PATH)"
                )
