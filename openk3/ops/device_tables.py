"""Tables on a device, remembered by what they were made from, for as long as work that reads them may be under way."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def device_table(most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: the last `most` results of a function of hashable arguments, one a torch.device, are remembered.

    On a CUDA device each stream has its own: what is pushed out is then overwritten behind all work that reads it.
    While a graph is captured, a result is taken from whichever stream has it, and kept for good, since every replay
    reads it at the same place. Raises RuntimeError if a capture needs one that does not exist yet: making it would wait
    for a copy to the device.
    """

    def decorate(make: Callable[P, R]) -> Callable[P, R]:
        found: OrderedDict[tuple[Hashable, int | None], Any] = OrderedDict()  # by arguments and stream
        kept: dict[Hashable, Any] = {}  # by arguments: what captured graphs read
        lock = threading.Lock()

        @wraps(make)
        def table(*args: P.args, **kwargs: P.kwargs) -> R:
            what = (args, tuple(kwargs.items()))
            device = _device(args, kwargs)
            if device is not None and torch.cuda.is_current_stream_capturing():
                return _captured(what)
            key = (what, None if device is None else _stream(device))
            with lock:
                if key in found:
                    found.move_to_end(key)
                    return found[key]
            result = make(*args, **kwargs)
            with lock:
                found[key] = result
                while len(found) > most:
                    found.popitem(last=False)
            return result

        def _captured(what: Hashable) -> Any:
            with lock:
                if what not in kept:
                    same = [result for (other, _), result in found.items() if other == what]
                    if not same:
                        raise RuntimeError(
                            f"{make.__name__}: a graph is being captured and these sequence lengths are new; "
                            "run the same call once before the capture"
                        )
                    kept[what] = same[-1]
                return kept[what]

        def forget() -> None:
            with lock:
                found.clear()

        setattr(table, "forget", forget)  # noqa: B010  (a function has no such attribute for a type checker)
        return table

    return decorate


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`; a GPU copies it from pinned memory in its own time, and is not waited for."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The CUDA device among the arguments, or None."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.device):
            return x if x.type == "cuda" else None
    return None


def _stream(device: torch.device) -> int:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)
