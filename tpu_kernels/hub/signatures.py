"""Signatures: who built a kernel, by sigstore, in the form stock `kernels` publishes them.

`metadata.json.sigstore` signs `metadata.json`, which lists the digests of all other files. The signer is a GitHub
workflow, and the user says which ones are accepted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, VerificationError
from .layout import METADATA_FILE, SIGNATURE_FILE, read_document

if TYPE_CHECKING:
    from sigstore.verify import Verifier
    from sigstore.verify.policy import VerificationPolicy

SIGNERS_VARIABLE = "TPU_KERNELS_SIGNERS"
ROOT_VARIABLE = "TPU_KERNELS_SIGSTORE_ROOT"

_SIGNER = re.compile(r"(https://github\.com/[\w.-]+/[\w.-]+)/\.github/workflows/[^@\s]+@\S+")
_ISSUER = "https://token.actions.githubusercontent.com"


def accepted_signers() -> tuple[str, ...]:
    """The workflows that `TPU_KERNELS_SIGNERS` lists; where it lists none, no signature is asked for.

    Raises:
        ConfigurationError: An entry is no workflow at a ref.
    """
    signers = tuple(filter(None, map(str.strip, os.environ.get(SIGNERS_VARIABLE, "").split(","))))
    for signer in signers:
        if not _SIGNER.fullmatch(signer):
            raise ConfigurationError(
                f"{SIGNERS_VARIABLE} lists {signer!r}; write a workflow at a ref, such as "
                "https://github.com/org/repo/.github/workflows/build.yaml@refs/heads/main"
            )
    return signers


def check_signature(folder: Path, signers: tuple[str, ...]) -> None:
    """Raises unless one of `signers` signed the `metadata.json` in a variant folder.

    The certificates are those of sigstore's public instance, or of the file `TPU_KERNELS_SIGSTORE_ROOT` names.
    With `HF_HUB_OFFLINE=1` the former are not updated.

    Raises:
        VerificationError: It is not signed, or not by any of them, or was changed since.
        ConfigurationError: sigstore is not installed, or its certificates cannot be read.
    """
    try:
        from sigstore.errors import Error as SigstoreError
        from sigstore.models import Bundle
    except ImportError as error:
        raise ConfigurationError(
            f"{SIGNERS_VARIABLE} asks for signatures, which takes sigstore; run: pip install 'tpu-kernels[sigstore]'"
        ) from error
    try:
        metadata, signature = (read_document(folder / name) for name in (METADATA_FILE, SIGNATURE_FILE))
    except OSError as error:
        raise VerificationError(
            f"the kernel in {folder} is not signed: {error}; nothing of it was run"
        ) from error
    verifier = _verifier()
    try:
        verifier.verify_artifact(metadata, Bundle.from_json(signature), _policy(signers))
    except (SigstoreError, ValueError) as error:
        raise VerificationError(
            f"the signature of the kernel in {folder} is not one of {', '.join(signers)} for its {METADATA_FILE}: "
            f"{error}; nothing of it was run"
        ) from error


def _policy(signers: tuple[str, ...]) -> VerificationPolicy:
    from sigstore.verify import policy

    workflows: list[VerificationPolicy] = []
    for signer in signers:
        repository = _SIGNER.fullmatch(signer)
        assert repository is not None
        workflows.append(
            policy.AllOf(
                [
                    policy.OIDCIssuerV2(_ISSUER),
                    policy.OIDCSourceRepositoryURI(repository[1]),
                    policy.OIDCBuildSignerURI(signer),
                ]
            )
        )
    return policy.AnyOf(workflows)


def _verifier() -> Verifier:
    from huggingface_hub import constants
    from sigstore.models import TrustedRoot
    from sigstore.verify import Verifier

    root = os.environ.get(ROOT_VARIABLE)
    try:
        if root:
            return Verifier(trusted_root=TrustedRoot.from_file(root))
        return Verifier.production(offline=bool(constants.HF_HUB_OFFLINE))
    except Exception as error:  # sigstore, TUF, the network and the file each have errors of their own
        origin = f"{ROOT_VARIABLE}={root}" if root else "sigstore's public instance"
        raise ConfigurationError(f"the certificates of {origin} cannot be read: {error}") from error
