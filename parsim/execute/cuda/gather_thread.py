"""A thread that makes one call after the other, of which workers may be forked.

Rejected: ThreadPoolExecutor. A process forked of its thread waits for that thread when it ends, which it is itself, and so ends
with an error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class GatherThread:
    """See the module.

    Args:
        begin: called in the thread first. Where it fails, so do all calls.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(begin,), name="parsim gather", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The call's result, once it is its turn."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Wait until all calls are made that were not cancelled."""
        self._calls.put(None)
        self._thread.join()

    def _serve(self, begin: Callable[[], None]) -> None:
        failed: BaseException | None = None
        try:
            begin()
        except BaseException as error:
            failed = error
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if failed is not None:
                    raise failed
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del entry, future, call  # they hold tensors
