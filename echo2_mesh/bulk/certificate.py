"""A certificate for one process's life, and TLS contexts that accept nothing below TLS 1.3.

The certificate says nothing about who we are: its hash is agreed over the signed ask protocol,
and compared. Called by `bulk.worker`.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

_LIFETIME = datetime.timedelta(days=3650)


def make_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
    """(server, client, fingerprint): the fingerprint is the SHA-256 of the certificate's DER.

    P-256, because every TLS library verifies it fast and some builds lack Ed25519.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "echo2")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LIFETIME)
        .not_valid_after(now + _LIFETIME)
        .sign(key, hashes.SHA256())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    server.num_tickets = 0  # lanes are never resumed
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # ssl reads keys from files alone
        file.write(certificate.public_bytes(Encoding.PEM))
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.flush()
        server.load_cert_chain(file.name)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.minimum_version = ssl.TLSVersion.TLSv1_3
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # the fingerprint is compared instead
    return server, client, hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()
