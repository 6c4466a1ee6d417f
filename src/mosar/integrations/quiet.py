"""Loading and saving models without what transformers and the hub print meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from logging import ERROR, getLogger

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and the advice of loading; some of them know no switch."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if bars:
            logging.enable_progress_bar()
