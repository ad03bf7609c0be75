"""The chat page at /. It uses the HTTP interface as any other client does."""

import base64
import hashlib
import re
from pathlib import Path

FILE = Path(__file__).with_name("page.html")


def read_page() -> tuple[str, dict[str, str]]:
    """The page and its headers.

    The content security policy allows only the script and the style sheet in the file, and requests to this server: injected
    markup can neither run nor load anything. No other site may show the page in a frame.
    """
    html = FILE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of_element("script", html),
        "style-src": _hash_of_element("style", html),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",  # no-referrer would make the origin of some requests null
        "Cache-Control": "no-cache",
    }
    return html, headers


def _hash_of_element(name: str, html: str) -> str:
    """The source expression of a policy that allows an inline element, by the hash of its text. The element occurs once."""
    (text,) = re.findall(rf"<{name}>(.*?)</{name}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
