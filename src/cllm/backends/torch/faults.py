"""What it means for requests and for the backend when torch fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cllm.backends.torch.device import is_out_of_memory
from cllm.errors import BackendError, CLLMError


class DeviceFaults:
    """Errors of one device, as the backend's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def error(self, error: Exception, doing: str) -> BackendError:
        """A lack of memory is one request's trouble; after anything else, nothing on the device is certain."""
        if is_out_of_memory(error):
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return BackendError(f"{self._device} has no memory for {doing}; lower resources.kv_cache_max_memory_mb")
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return BackendError(f"torch failed at {doing} on {self._device}: {reason}", fatal=True)

    @contextmanager
    def at(self, doing: str | Callable[[], str]) -> Iterator[None]:
        try:
            yield
        except CLLMError:
            raise
        except Exception as error:
            raise self.error(error, doing if isinstance(doing, str) else doing()) from error


@contextmanager
def if_no_room(told: CLLMError) -> Iterator[None]:
    """Raise `told` where memory is lacking."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CLLMError) or not is_out_of_memory(error):
            raise
        raise told from error
