"""Certificates of an authority that exists for one test session."""

from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization


@dataclass(frozen=True)
class Pair:
    """A certificate and its key (PKCS#8), in PEM; ``both`` is one file with the two."""

    certificate: Path
    key: Path
    both: Path


@dataclass(frozen=True)
class Certificates:
    """authority: whom to trust. server: for localhost and 127.0.0.1. client: of one who is let in by certificate."""

    authority: Path
    server: Pair
    client: Pair


def issue(directory: Path) -> Certificates:
    """Make them in ``directory``."""
    authority = trustme.CA()
    path = directory / "ca.pem"
    authority.cert_pem.write_to_path(path)
    server = _pair(authority.issue_cert("localhost", "127.0.0.1"), directory, "server")
    client = _pair(authority.issue_cert("worker.test", common_name="worker"), directory, "client")
    return Certificates(path, server, client)


def _pair(issued: trustme.LeafCert, directory: Path, name: str) -> Pair:
    # Java takes PKCS#8 alone.
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    pair = Pair(*(directory / f"{name}.{suffix}" for suffix in ("crt", "key", "pem")))
    for path, content in ((pair.certificate, chain), (pair.key, key), (pair.both, key + chain)):
        path.touch(0o600)
        path.write_bytes(content)
    return pair
