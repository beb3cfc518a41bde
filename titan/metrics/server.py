"""Whether a tracker's server answers. Free of torch."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request

UNAVAILABLE = (502, 503, 504)
"""What a gateway answers for a server that is not there."""


def server_answers(url: str, seconds: float) -> bool:
    """Whether an HTTP server answers at `url`; wandb's own timeout is far longer."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError as error:
        return error.code not in UNAVAILABLE
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # wandb has its own certificates
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True
