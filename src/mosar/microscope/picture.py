"""A picture of the page, taken by an installed Chromium or Chrome."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import parse_qsl

from mosar.errors import MosarError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Of page.html and page.js.
SECTIONS = ("top", "reading", "map-section", "global", "savings")
_KEYS = ("alone", "role", "layer", "group", "token")
_SIZE = "1280,800"
# The page unpacks its numbers before it draws; this is the page's own clock, in milliseconds.
_TIME_TO_DRAW = 10_000
_SECONDS = 120


def find_browser() -> str | None:
    """The path of the first of `BROWSERS` that is installed."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def require_browser() -> str:
    """Its path, or a MosarError that names what to install."""
    path = find_browser()
    if path is None:
        raise MosarError(
            "--picture needs Chromium or Chrome, which takes the picture: install one of "
            f"{', '.join(BROWSERS)}, or leave --picture out and open the page yourself"
        )
    return path


def checked_view(view: str) -> str:
    """`view` without its #; a ValueError says what page.js would not understand."""
    view = view.removeprefix("#")
    section, _, asked = view.partition("?")
    if section not in SECTIONS:
        raise ValueError(f"--view must begin with one of {', '.join(SECTIONS)}, got {view!r}")
    for key, value in parse_qsl(asked, keep_blank_values=True):
        if key not in _KEYS:
            raise ValueError(f"--view knows {', '.join(_KEYS)} after the ?, got {key!r}")
        if key != "alone" and not value.isdecimal():
            raise ValueError(f"--view: {key} must be a whole number, got {value!r}")
    return view


def take_picture(html: str, view: str) -> bytes:
    """A PNG of the page `html` at `view`, the part of its address after the #."""
    browser = require_browser()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page, picture = Path(folder) / "look.html", Path(folder) / "look.png"
        page.write_text(html, encoding="utf-8")
        # Chromium refuses its sandbox to root.
        sandbox = ["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
        order = [
            *(browser, "--headless=new", *sandbox, "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb"),
            *(f"--user-data-dir={folder}/profile", f"--window-size={_SIZE}"),
            *(f"--virtual-time-budget={_TIME_TO_DRAW}", f"--screenshot={picture}"),
            f"{page.as_uri()}#{checked_view(view)}",
        ]
        try:
            ended = subprocess.run(
                order, capture_output=True, text=True, errors="replace", timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MosarError(f"--picture: {browser} failed: {error}") from None
        if not picture.exists():
            said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            raise MosarError(f"--picture: {browser} took no picture: {said[-1]}")
        return picture.read_bytes()
