"""TLS: check the certificate's files before anything slow begins, and reload them when they are renewed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from dataclasses import dataclass, field

from ...errors import UserError
from ...settings.settings import Settings

logger = logging.getLogger(__name__)

POLL_SECONDS = 60.0
"""Time between two checks of the certificate's files."""


@dataclass(slots=True)
class Tls:
    """Files in PEM format. clients: certificates of the authorities that may sign clients' certificates.

    context: of new connections. A changed file makes another one: a context forgets no authority that it has read.
    """

    certificate: str
    key: str | None
    clients: str | None
    password: str | None
    context: ssl.SSLContext = field(init=False)

    @classmethod
    def of(cls, settings: Settings) -> Tls | None:
        """Return the settings' files; None for plain HTTP. Raises UserError if they cannot be used."""
        if settings.ssl_certfile is None:
            return None
        password = os.environ.get("OUTRIDER_SSL_KEYFILE_PASSWORD")
        tls = cls(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs, password)
        try:
            tls._load()
        except ValueError as error:
            raise UserError(str(error)) from None
        return tls

    def refusal(self) -> str | None:
        """Return why clients will refuse the certificate, usually that it has expired; None if they accept it.

        Tries a handshake in memory.
        """
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its issuer is not checked
        client.check_hostname = False  # nor is the name of the server
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking, answering = client.wrap_bio(back, there), self.context.wrap_bio(there, back, server_side=True)
        try:
            client.load_verify_locations(self.certificate)
            for end in (asking, answering, asking):
                with contextlib.suppress(ssl.SSLWantReadError):  # the other side's turn
                    end.do_handshake()
        except OSError as error:  # the file may be changing; an SSLError is an OSError
            return getattr(error, "verify_message", str(error))
        return None

    def warn(self) -> None:
        """Log an error if clients will refuse the certificate."""
        if (refusal := self.refusal()) is not None:
            logger.error("clients will not take the certificate %s: %s", self.certificate, refusal)

    async def watch(self) -> None:
        """Read the files again when they change."""
        seen = self._changed()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if (now := self._changed()) == seen:
                continue
            seen = now
            try:
                self._load()
            except ValueError as error:
                logger.error("the certificate stays as it was: %s", error)
            else:
                logger.warning("certificate read again: %s", self.certificate)
                self.warn()

    def _load(self) -> None:
        """Read the files into a new context; raises ValueError with the reason, and keeps the old one."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        key = self.key or self.certificate
        try:
            context.load_cert_chain(self.certificate, self.key, lambda: self.password or "")  # never asks a terminal
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(f"key {key} is not that of certificate {self.certificate}") from None
            hint = "" if self.password else "; OUTRIDER_SSL_KEYFILE_PASSWORD opens one that is encrypted"
            hint += "" if self.key else "; --ssl-keyfile names a key in a file of its own"
            reason = f"{error.reason}; " if error.reason else ""
            raise ValueError(
                f"certificate {self.certificate} and key {key} cannot be used: {reason}both have to be PEM{hint}"
            ) from None
        except OSError as error:
            raise ValueError(
                f"certificate {self.certificate} or key {key} cannot be read: {error.strerror or error}"
            ) from None
        if self.clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.clients)
            except ssl.SSLError as error:
                raise ValueError(f"--ssl-ca-certs {self.clients} cannot be used: {error.reason or error}") from None
            except OSError as error:
                raise ValueError(f"--ssl-ca-certs {self.clients} cannot be read: {error.strerror or error}") from None
        self.context = context

    def _changed(self) -> list[int]:
        times = []
        for path in (self.certificate, self.key, self.clients):
            try:
                times.append(os.stat(path).st_mtime_ns if path else 0)
            except OSError:
                times.append(-1)
        return times
