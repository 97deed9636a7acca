"""Pages in browsers that may play: browsers say of which origin a page is, and ask before they send what it wants.

A page of any site reaches the ports of its reader's machine. So a request that names an origin is refused unless
`external.origins` has it; clients that are no pages name none. (Fetch standard, section 3.2: CORS protocol.)
A page whose own name leads to this machine is of the same origin to its browser, which names none of what it reads:
`Host` has that name.
"""

import ipaddress
import re
from collections.abc import Collection

from jrl.errors import InputError
from jrl.serve.protocol import CLIENT, Refused, Request, Response
from jrl.settings.external import ExternalConfig

ANY = "*"
_ORIGIN = re.compile(r"https?://[^\s/?#@*,]+", re.IGNORECASE)
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d*)?", re.IGNORECASE)
_Headers = tuple[tuple[str, str], ...]


def allowed(cfg: ExternalConfig, token: bytes | None) -> frozenset[str]:
    """Returns the origins of the section, as browsers write them. Raises InputError: one is none, or needs a token."""
    for origin in cfg.origins:
        if origin == ANY:
            if token is None:
                raise InputError(
                    f"external.origins: {ANY} lets every page play that anybody here opens: name the origins, or set "
                    "external.token_file (--token-file)"
                )
            continue
        if not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"external.origins: {origin!r} is no origin: expected http://HOST or http://HOST:PORT without a path, "
                "as the address of the page begins"
            )
    return frozenset(origin.lower() for origin in cfg.origins)


def headers(request: Request, known: Collection[str]) -> _Headers:
    """Returns the headers of an answer to a browser. Raises Refused: pages of that origin may not play."""
    origin = request.headers.get("origin")
    if origin is None:
        return ()
    if ANY not in known and origin not in known:
        raise Refused(403, f"pages of {origin[:200]} may not play: name it in external.origins")
    return ("Access-Control-Allow-Origin", origin), ("Vary", "Origin")


def of_this_machine(request: Request) -> None:
    """Raises Refused: the request names a host that is not this machine's own name or loopback address.

    Without a token a page could otherwise read by a name that first led to its site, and then here (DNS rebinding).
    Clients that name no host are no browsers.
    """
    given = request.headers.get("host")
    if given is None:
        return
    found = _HOST.fullmatch(given)
    name = (found[1] or found[2]).lower() if found else ""
    if name == "localhost":
        return
    try:
        known = ipaddress.ip_address(name).is_loopback
    except ValueError:
        known = False
    if not known:
        raise Refused(
            403,
            f"Host: expected localhost, 127.0.0.1 or [::1], got {given[:200]}: a page may have led its own name here. "
            "Ask by one of these, or set external.token_file (--token-file)",
        )


def is_question(request: Request) -> bool:
    """Returns whether a browser asks what a page may send (a preflight), for which it shows no token."""
    return request.method == "OPTIONS" and {"origin", "access-control-request-method"} <= request.headers.keys()


def answer(request: Request) -> Response:
    """Answers a preflight, for ten minutes."""
    told: _Headers = (
        ("Access-Control-Allow-Methods", "GET, POST"),
        ("Access-Control-Allow-Headers", f"authorization, content-type, {CLIENT}"),
        ("Access-Control-Max-Age", "600"),
    )
    if "access-control-request-private-network" in request.headers:
        told += (("Access-Control-Allow-Private-Network", "true"),)
    return Response(200, b"{}", headers=told)
