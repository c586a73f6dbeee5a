"""TLS between a trainer and its receivers. The control route carries the fingerprint of the trainer's certificate."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from rl_memory_plugins.errors import InvalidRequestError, WeightUpdateError
from rl_memory_plugins.extras import needs

#: `False`: no TLS. `True`: a certificate of the session's own. Else the files of a certificate and its key, in PEM.
Tls = bool | Sequence[str | os.PathLike[str]]


class ServerTls:
    """The trainer's side.

    Args:
        tls: Not `False`.

    Attributes:
        fingerprint: The SHA-256 of the certificate, in hex.

    Raises:
        InvalidRequestError: the files cannot be read, do not belong together, or are not given where the package
            `cryptography` is missing.
    """

    def __init__(self, tls: Tls) -> None:
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0  # a side that leaves them unread would reset the connection as it closes
        try:
            if isinstance(tls, bool):
                self.fingerprint = self._load_own()
            else:
                certificate, key = tls
                self._context.load_cert_chain(certificate, key, password=_no_password)
                self.fingerprint = _fingerprint(ssl.PEM_cert_to_DER_cert(_first_certificate(Path(certificate))))
        except ModuleNotFoundError as error:
            raise InvalidRequestError(
                f"tls=True makes a certificate, and {error}; or give the files of one: tls=(certificate, key)",
                field="tls",
            ) from None
        except (OSError, ValueError, TypeError) as error:  # an `ssl.SSLError` is an `OSError`
            raise InvalidRequestError(f"cannot use tls={tls!r}: {error}", field="tls") from None

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """The receiver's connection, before the two sides shake hands. The result owns the connection."""
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _load_own(self) -> str:
        """Make a certificate and its key. The key never lies in a file system."""
        certificate, private = _own_certificate()
        fd = os.memfd_create("rl-memory-certificate", os.MFD_CLOEXEC)
        try:
            os.write(fd, private + certificate)
            self._context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return _fingerprint(ssl.PEM_cert_to_DER_cert(certificate.decode()))


def connect(sock: socket.socket, fingerprint: str) -> ssl.SSLSocket:
    """The receiver's side: shake hands within the timeout of the socket. The result owns the connection.

    Raises:
        OSError: the other side speaks no TLS, or does not answer.
        WeightUpdateError: the other side has another certificate. It has seen no token.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the fingerprint says more than a name, and trusts no authority
    context.verify_mode = ssl.CERT_NONE
    wrapped = context.wrap_socket(sock)
    shown = _fingerprint(wrapped.getpeercert(binary_form=True) or b"")
    if not hmac.compare_digest(shown, fingerprint):
        wrapped.close()
        raise WeightUpdateError(
            "the trainer's certificate is not the one that the control route named: another process listens there, or "
            "a proxy ends the TLS connection",
            reason="certificate",
        )
    return wrapped


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _own_certificate() -> tuple[bytes, bytes]:
    """A self-signed certificate that is valid for some days, and its private key, both in PEM."""
    with needs("remote"):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rl-memory trainer")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), private


def _first_certificate(path: Path) -> str:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    text = path.read_text()
    return text[text.index(begin) : text.index(end) + len(end)]


def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def _no_password() -> str:
    raise ValueError("the key has a password: give a key without one")
