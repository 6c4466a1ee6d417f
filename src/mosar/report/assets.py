"""What pages that stand alone need: a package's files, and the policy that lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from markupsafe import Markup


def read_asset(name: str, package: str = "mosar.report") -> Markup:
    """A file of the package: a page's own template, style or script."""
    return Markup(files(package).joinpath(name).read_text(encoding="utf-8"))


def content_policy(style: str, script: str) -> str:
    """Nothing is fetched and no script runs but the page's own, whatever its data says."""
    allowed_style, allowed_script = (
        f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
        for source in (style, script)
    )
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {allowed_script}",
            "require-trusted-types-for 'script'",
            f"style-src {allowed_style}",
            # Colours of series, and what matplotlib writes.
            "style-src-attr 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
