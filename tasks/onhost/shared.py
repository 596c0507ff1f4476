"""What the programs that bring an engine have in common; travels to the host beside them.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import errno
import hashlib
import re
from typing import Any, Dict, List, Optional

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def redact(text: str) -> str:
    """Credentials in URLs replaced."""
    return re.sub(r"(?<=://)[^/@\s]+(?=@)", "****", text)


class Problem(Exception):
    """Why a program cannot do what it is for, in the words of its answer."""

    def __init__(self, identifier: str, what: str, fix: str, file: Optional[str] = None):
        super().__init__(what)
        self.id, self.what, self.fix, self.file = identifier, what, fix, file

    def document(self) -> Dict[str, Any]:
        """The answer on stdout."""
        return {"error": {"id": self.id, "what": redact(self.what), "file": self.file, "fix": self.fix}}


def of_the_system(error: OSError) -> Problem:
    """What the system refused, as a Problem: disk_full, permission, or system for all else."""
    if error.errno in NO_ROOM:
        return Problem("disk_full", str(error), "free space there and run again", error.filename)
    if error.errno in NOT_ALLOWED:
        return Problem("permission", str(error), "let this user write there", error.filename)
    return Problem("system", str(error), "put right what the message names and run again", error.filename)


def sha256_of(path: str) -> str:
    """SHA-256 of a file, in constant memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def mirrored(url: str, mirrors: List[List[str]]) -> List[str]:
    """An address at mirrors, [[prefix, replacement]], in their order."""
    return [new + url[len(old) :] for old, new in mirrors if url.startswith(old)]
