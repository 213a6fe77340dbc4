"""Content digests of files, folders and JSON values: the names everything in a run is known by."""

import hashlib
import json
from pathlib import Path
from typing import Any


def of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def of_json(value: Any) -> str:
    """The digest of a JSON value; the order of keys does not matter."""
    return of_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_folder(path: Path) -> str:
    """The digest of the names and contents of all files under `path`."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return of_json({file.relative_to(path).as_posix(): of_file(file) for file in files})


def short(digest: str) -> str:
    """The first twelve hex digits: enough to name a file or a policy."""
    return digest[:12]
