"""Address, token and TLS of a server."""

import ipaddress
import socket
import ssl

from jrl.errors import InputError
from jrl.fields.paths import resolve
from jrl.settings.external import ExternalConfig


def bound(cfg: ExternalConfig, token: bytes | None) -> socket.socket:
    """Makes a socket at the address of the section; connections are refused until a server answers there.

    Raises:
      InputError: the address is taken or none of this machine's, or it can be reached by others without a token.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise InputError(f"external.host {cfg.host}: {e.strerror}: name an address of this machine") from e
    if token is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise InputError(
            f"external.host {cfg.host} can be reached from other machines, and nothing says who may: set "
            "external.token_file (--token-file)"
        )
    found = socket.socket(family, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as e:
        found.close()
        raise InputError(
            f"external.port {cfg.port}: cannot listen at {cfg.host}:{cfg.port} ({e.strerror}): name another port"
        ) from e
    return found


def token_of(cfg: ExternalConfig) -> bytes | None:
    """Returns the token of the section's file. Raises InputError: it cannot be read, or is too short to be a secret."""
    if cfg.token_file is None:
        return None
    try:
        lines = resolve(cfg.token_file, "external.token_file", "file").read_text().split()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"external.token_file: cannot read {cfg.token_file}: {e}") from e
    if not lines or len(lines[0]) < 16 or not lines[0].isascii():
        raise InputError(
            f"external.token_file: {cfg.token_file} must hold a secret of 16 characters or more, such as what "
            "python -c 'import secrets; print(secrets.token_hex())' prints"
        )
    return lines[0].encode()


def tls(cfg: ExternalConfig) -> ssl.SSLContext | None:
    """Makes the TLS context of the section's certificate; None without. Raises InputError: the files are not valid."""
    if cfg.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for name in ("certificate", "private_key"):
        if getattr(cfg, name) is not None:
            resolve(getattr(cfg, name), f"external.{name}", "file")
    try:
        context.load_cert_chain(cfg.certificate, cfg.private_key)
    except (OSError, ssl.SSLError) as e:
        raise InputError(f"external.certificate: cannot use {cfg.certificate}: {e}") from e
    return context


def url(sock: socket.socket, *, tls: bool) -> str:
    """Returns http://HOST:PORT of a socket that is bound."""
    host, port = sock.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{name}:{port}"
