"""Signatures by sigstore: verified for real, with a certificate authority and logs that live in this test."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

import tpu_kernels
from tpu_kernels.errors import ConfigurationError, VerificationError

from .conftest import Publish, Serve

pytest.importorskip("sigstore")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

REPO = "tpu-kernels/signed"
SOURCE = "https://github.com/acme/kernels"
SIGNER = f"{SOURCE}/.github/workflows/build.yaml@refs/heads/main"
SCT_LIST = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
ECDSA = ec.ECDSA(hashes.SHA256())


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def key_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(public(key)).digest()


class Sigstore:
    """A sigstore of this test's own: it certifies workflows, and logs certificates and signatures."""

    def __init__(self) -> None:
        self.authority, self.certificates, self.signatures = (
            ec.generate_private_key(ec.SECP256R1()) for _ in range(3)
        )
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's authority")])
        self.now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        self.root = (
            self._builder(self.name, self.authority)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(self._usage(key_cert_sign=True, crl_sign=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self.authority.public_key()), critical=False
            )
            .sign(self.authority, hashes.SHA256())
        )

    def trusted_root(self) -> dict[str, Any]:
        valid = {"start": "2020-01-01T00:00:00Z"}

        def log(name: str, key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            details = {
                "rawBytes": b64(public(key)),
                "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                "validFor": valid,
            }
            return {
                "baseUrl": f"https://{name}.invalid",
                "hashAlgorithm": "SHA2_256",
                "publicKey": details,
                "logId": {"keyId": b64(key_id(key))},
            }

        authority = {
            "subject": {"organization": "a test", "commonName": "a test's authority"},
            "uri": "https://authority.invalid",
            "certChain": {"certificates": [{"rawBytes": b64(self.root.public_bytes(Encoding.DER))}]},
            "validFor": valid,
        }
        return {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log("signatures", self.signatures)],
            "certificateAuthorities": [authority],
            "ctlogs": [log("certificates", self.certificates)],
            "timestampAuthorities": [],
        }

    def sign(self, content: bytes, signer: str = SIGNER, source: str = SOURCE) -> dict[str, Any]:
        """The bundle that a workflow gets for a file."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certify(key, signer, source)
        signature = key.sign(content, ECDSA)
        pem = certificate.public_bytes(Encoding.PEM)
        body = {
            "apiVersion": "0.0.1",
            "kind": "hashedrekord",
            "spec": {
                "data": {"hash": {"algorithm": "sha256", "value": hashlib.sha256(content).hexdigest()}},
                "signature": {"content": b64(signature), "publicKey": {"content": b64(pem)}},
            },
        }
        entry = json.dumps(body, separators=(",", ":")).encode()
        leaf = hashlib.sha256(b"\0" + entry).digest()
        logged = int(time.time())
        promise = {
            "body": b64(entry),
            "integratedTime": logged,
            "logID": key_id(self.signatures).hex(),
            "logIndex": 0,
        }
        promised = self.signatures.sign(json.dumps(promise, separators=(",", ":")).encode(), ECDSA)
        note = f"signatures.invalid\n1\n{b64(leaf)}\n"
        noted = key_id(self.signatures)[:4] + self.signatures.sign(note.encode(), ECDSA)
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": b64(certificate.public_bytes(Encoding.DER))},
                "tlogEntries": [
                    {
                        "logIndex": "0",
                        "logId": {"keyId": b64(key_id(self.signatures))},
                        "kindVersion": {"kind": "hashedrekord", "version": "0.0.1"},
                        "integratedTime": str(logged),
                        "inclusionPromise": {"signedEntryTimestamp": b64(promised)},
                        "inclusionProof": {
                            "logIndex": "0",
                            "rootHash": b64(leaf),
                            "treeSize": "1",
                            "hashes": [],
                            "checkpoint": {"envelope": f"{note}\n\u2014 signatures.invalid {b64(noted)}\n"},
                        },
                        "canonicalizedBody": b64(entry),
                    }
                ],
            },
            "messageSignature": {
                "messageDigest": {"algorithm": "SHA2_256", "digest": b64(hashlib.sha256(content).digest())},
                "signature": b64(signature),
            },
        }

    def _certify(self, key: ec.EllipticCurvePrivateKey, signer: str, source: str) -> x509.Certificate:
        claims = {8: "https://token.actions.githubusercontent.com", 9: signer, 12: source}
        builder = (
            self._builder(x509.Name([]), key)
            .add_extension(self._usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(signer)]), critical=True
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()),
                critical=False,
            )
        )
        for number, claim in claims.items():
            oid = x509.ObjectIdentifier(f"1.3.6.1.4.1.57264.1.{number}")
            text = claim.encode()
            assert len(text) < 128
            value = b"\x0c" + bytes([len(text)]) + text
            builder = builder.add_extension(x509.UnrecognizedExtension(oid, value), critical=False)
        # The log signs the certificate as it is without the log's own word in it.
        stamp = int(self.now.timestamp() * 1000)
        draft = self._with_word(builder, stamp, b"\x30\x00").tbs_precertificate_bytes
        signed = struct.pack("!BBQH", 0, 0, stamp, 1) + key_id(self.authority)
        signed += len(draft).to_bytes(3, "big") + draft + b"\0\0"
        return self._with_word(builder, stamp, self.certificates.sign(signed, ECDSA))

    def _with_word(self, builder: x509.CertificateBuilder, stamp: int, signature: bytes) -> x509.Certificate:
        word = (
            b"\0"
            + key_id(self.certificates)
            + struct.pack("!QHBBH", stamp, 0, 4, 3, len(signature))
            + signature
        )
        words = struct.pack("!HH", len(word) + 2, len(word)) + word
        assert len(words) < 256
        head = b"\x04" + (bytes([len(words)]) if len(words) < 128 else bytes([0x81, len(words)]))
        extension = x509.UnrecognizedExtension(SCT_LIST, head + words)
        return builder.add_extension(extension, critical=False).sign(self.authority, hashes.SHA256())

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - datetime.timedelta(minutes=5))
            .not_valid_after(self.now + datetime.timedelta(minutes=10))
        )

    def _usage(self, **used: bool) -> x509.KeyUsage:
        names = (
            "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign "
            "crl_sign encipher_only decipher_only"
        )
        return x509.KeyUsage(**{name: used.get(name, False) for name in names.split()})


@pytest.fixture
def sigstore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sigstore:
    """The test's own sigstore, which the process trusts, for signatures of one workflow."""
    sigstore = Sigstore()
    (tmp_path / "root.json").write_text(json.dumps(sigstore.trusted_root()))
    monkeypatch.setenv("TPU_KERNELS_SIGSTORE_ROOT", str(tmp_path / "root.json"))
    monkeypatch.setenv(
        "TPU_KERNELS_SIGNERS", f"{SOURCE}/.github/workflows/other.yaml@refs/heads/main, {SIGNER}"
    )
    return sigstore


@pytest.fixture
def metadata(publish: Publish, tmp_path: Path) -> Path:
    """The `metadata.json` of a kernel that is to be served, with digests."""
    publish(REPO, "NUMBER = 1")
    path = tmp_path / "repositories" / REPO / "v1" / "build" / "torch-tpu" / "metadata.json"
    code = path.with_name("__init__.py").read_bytes()
    digest = {"algorithm": "sha256", "files": {"__init__.py": b64(hashlib.sha256(code).digest())}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": digest}))
    return path


def put(metadata: Path, bundle: object) -> None:
    metadata.with_name("metadata.json.sigstore").write_text(json.dumps(bundle))


def test_a_kernel_that_an_accepted_workflow_signed_loads(
    sigstore: Sigstore, metadata: Path, serve: Serve
) -> None:
    put(metadata, sigstore.sign(metadata.read_bytes()))
    serve()
    assert tpu_kernels.get_kernel(REPO, version=1).NUMBER == 1


def test_stock_accepts_the_same(sigstore: Sigstore, metadata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = pytest.importorskip("kernels.verify")
    from sigstore.models import TrustedRoot
    from sigstore.verify import Verifier

    put(metadata, sigstore.sign(metadata.read_bytes()))
    root = TrustedRoot.from_file(str(metadata.parents[6] / "root.json"))
    monkeypatch.setattr(verify.Verifier, "production", lambda: Verifier(trusted_root=root))
    policies = [verify.policy.OIDCBuildSignerURI(SIGNER)]
    assert isinstance(verify.verify_variant(metadata.parent, policies), verify.VerificationResult.Success)


def test_without_a_signature_it_is_refused(sigstore: Sigstore, metadata: Path, serve: Serve) -> None:
    serve()
    with pytest.raises(VerificationError, match="is not signed: "):
        tpu_kernels.get_kernel(REPO, version=1)


@pytest.mark.parametrize(
    ("signer", "source"),
    [
        (f"{SOURCE}/.github/workflows/evil.yaml@refs/heads/main", SOURCE),
        (SIGNER, "https://github.com/evil/fork"),
    ],
)
def test_the_signature_of_somebody_else_is_refused(
    sigstore: Sigstore, metadata: Path, serve: Serve, signer: str, source: str
) -> None:
    put(metadata, sigstore.sign(metadata.read_bytes(), signer, source))
    serve()
    with pytest.raises(VerificationError, match=r"the signature of the kernel in .* is not one of "):
        tpu_kernels.get_kernel(REPO, version=1)


def test_metadata_that_was_changed_after_it_was_signed_is_refused(
    sigstore: Sigstore, metadata: Path, serve: Serve
) -> None:
    put(metadata, sigstore.sign(metadata.read_bytes()))
    metadata.write_text(metadata.read_text() + "\n")
    serve()
    with pytest.raises(VerificationError, match="is not one of "):
        tpu_kernels.get_kernel(REPO, version=1)


def test_an_authority_that_nobody_trusts_is_refused(sigstore: Sigstore, metadata: Path, serve: Serve) -> None:
    put(metadata, Sigstore().sign(metadata.read_bytes()))
    serve()
    with pytest.raises(VerificationError, match="is not one of "):
        tpu_kernels.get_kernel(REPO, version=1)


@pytest.mark.parametrize(
    "bundle", [{}, [], None, {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}]
)
def test_what_is_no_bundle_is_refused(
    sigstore: Sigstore, metadata: Path, serve: Serve, bundle: object
) -> None:
    put(metadata, bundle)
    serve()
    with pytest.raises(VerificationError, match="is not one of "):
        tpu_kernels.get_kernel(REPO, version=1)


def test_settings_that_cannot_be_read_are_named(
    sigstore: Sigstore, metadata: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(metadata, sigstore.sign(metadata.read_bytes()))
    serve()
    monkeypatch.setenv("TPU_KERNELS_SIGSTORE_ROOT", "/nowhere/root.json")
    with pytest.raises(
        ConfigurationError, match=r"TPU_KERNELS_SIGSTORE_ROOT=/nowhere/root\.json cannot be read"
    ):
        tpu_kernels.get_kernel(REPO, version=1)
    monkeypatch.setenv("TPU_KERNELS_SIGNERS", "acme")
    with pytest.raises(
        ConfigurationError, match="TPU_KERNELS_SIGNERS lists 'acme'; write a workflow at a ref"
    ):
        tpu_kernels.get_kernel(REPO, version=1)
