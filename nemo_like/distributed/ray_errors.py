"""Errors of Ray's processes, logged; Ray would print them in the user's terminal."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ray import JobID
from ray._private import worker as ray_worker

logger = logging.getLogger(__name__)


@contextmanager
def errors_in_log() -> Iterator[None]:
    """Within, ``ray.init`` starts our listener instead of its own.

    Its own prints a page of advice for each worker that dies, before the sentence that names it.
    """
    was = ray_worker.listen_error_messages
    ray_worker.listen_error_messages = _log_errors
    try:
        yield
    finally:
        ray_worker.listen_error_messages = was


def _log_errors(worker: Any, stopped: threading.Event) -> None:
    """Log what concerns this job or the whole cluster, until ``stopped``."""
    ours = (None, worker.current_job_id.binary(), JobID.nil().binary())
    with suppress(OSError):  # the head is gone, which others notice
        worker.gcs_error_subscriber.subscribe()
        while not stopped.is_set():
            _, error = worker.gcs_error_subscriber.poll()
            if error is not None and error["job_id"] in ours:
                logger.info("Ray: %s", error["error_message"], extra={"file_only": True})
