"""Trust: whose kernels may run here, before anything of them is downloaded.

A kernel is code. Whoever is asked for comes in one of three ways: the user opts in for a call
(`trust_remote_code`), the user keeps an allow-list, or the Hub calls the organisation a trusted kernel
publisher. The first two are here; the third is the Hub's to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError, UntrustedKernelError

LIST_VARIABLE = "TPU_KERNELS_TRUST"
FILE_VARIABLE = "TPU_KERNELS_TRUST_FILE"

_NAME = r"[A-Za-z0-9_]+(?:[-.]+[A-Za-z0-9_]+)*"
_ENTRY = re.compile(f"{_NAME}(?:/{_NAME})?")


@dataclass(frozen=True)
class Trust:
    """Whom the user trusts: everyone, or organisations (`org`) and repositories (`org/name`) by name.

    `names` holds pairs of a name and who listed it.
    """

    everyone: bool = False
    names: frozenset[tuple[str, str]] = frozenset()

    def reason(self, repo_id: str) -> str | None:
        """Why the user trusts a repository, None if not.

        Example:
            >>> Trust.of(["acme"]).reason("acme/relu")
            'trust_remote_code lists acme'
        """
        if self.everyone:
            return "trust_remote_code=True"
        organisation = repo_id.partition("/")[0]
        for name, origin in sorted(self.names):
            if name in (repo_id, organisation):
                return f"{origin} lists {name}"
        return None

    @classmethod
    def of(cls, trust_remote_code: bool | Iterable[str] = False) -> Trust:
        """The trust that a call states, with the allow-lists of the environment.

        `TPU_KERNELS_TRUST` lists names with commas between them; `TPU_KERNELS_TRUST_FILE` is a file with a
        name a line, and `#` before comments.

        Raises:
            ConfigurationError: A list cannot be read, or an entry names nothing.
        """
        if isinstance(trust_remote_code, bool):
            names = []
        elif isinstance(trust_remote_code, str):
            raise ConfigurationError(
                f"trust_remote_code={trust_remote_code!r} is no list; write "
                f"trust_remote_code=[{trust_remote_code!r}]"
            )
        else:
            names = [_entry(name, "trust_remote_code") for name in trust_remote_code]
        listed = os.environ.get(LIST_VARIABLE, "")
        names += [_entry(name.strip(), LIST_VARIABLE) for name in listed.split(",") if name.strip()]
        if file := os.environ.get(FILE_VARIABLE):
            lines = [line.partition("#")[0].strip() for line in _read(Path(file)).splitlines()]
            names += [_entry(line, file) for line in lines if line]
        return cls(trust_remote_code is True, frozenset(names))


def untrusted(repo_id: str, why: str) -> UntrustedKernelError:
    """The error for a repository that nobody vouches for, with what to add where."""
    organisation = repo_id.partition("/")[0]
    return UntrustedKernelError(
        f"{repo_id} is not trusted: {why}; nothing of it was run. If you trust it, pass "
        f"trust_remote_code=[{repo_id!r}] (or [{organisation!r}] for all of {organisation}), or --trust to a command, "
        f"set {LIST_VARIABLE}={repo_id}, or add the line {repo_id} to the file that {FILE_VARIABLE} names"
    )


def _entry(name: object, origin: str) -> tuple[str, str]:
    if not isinstance(name, str) or not _ENTRY.fullmatch(name):
        raise ConfigurationError(
            f"{origin} lists {name!r}, which is neither an organisation nor a repository; "
            "write 'org' or 'org/name'"
        )
    return name, origin


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{FILE_VARIABLE}={file} cannot be read: {error}") from error
