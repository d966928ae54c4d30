"""Ahead: the next batches are packed by a process of their own while a GPU is busy with this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import queue
import signal
import threading
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import torch

from openk3.data.loader import Loader
from openk3.inputs.packed import Packed

AHEAD = 3  # batches


class Ahead:
    """A Loader's batches and states, the same ones, made before they are asked for.

    What is made ahead assumes that the window length stays; when it changes, the process goes back to where the
    batches that were given out end. Errors of the loader are raised where its batch would have been given out.
    """

    def __init__(self, loader: Loader) -> None:
        """Start the process; it has a copy of `loader` as it is now. To be made before CUDA is first used."""
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._state = loader.state_dict()
        self._asked: deque[int] = deque()
        self._process = context.Process(target=_serve, args=(loader, other, self._pipe), daemon=True)
        self._process.start()
        other.close()
        self._answers: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def batch(self, seq_len: int) -> list[Packed]:
        """As `Loader.batch`. Raises what it raises, and RuntimeError if the process has died."""
        if any(asked != seq_len for asked in self._asked):
            self.load_state_dict(self._state)
        while len(self._asked) < AHEAD:
            self._send(("batch", seq_len))
            self._asked.append(seq_len)
        batch, state = self._receive()
        self._asked.popleft()
        if isinstance(batch, BaseException):
            self.load_state_dict(self._state)
            raise batch
        self._state = state
        return batch

    def state_dict(self) -> dict[str, Any]:
        """As `Loader.state_dict`, after the last batch given out."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Loader.load_state_dict`; what was made ahead is thrown away."""
        for _ in range(len(self._asked)):
            self._receive()
        self._asked.clear()
        self._send(("state", state))
        error, self._state = self._receive()
        if error is not None:
            raise error

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(RuntimeError):  # it may have died
            self._send(("stop", None))
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send_bytes(pickle.dumps(message))
        except OSError as error:
            raise RuntimeError("the process that reads the training data has died") from error

    def _read(self) -> None:
        """Take answers off the pipe as they come, so that neither side waits for the other; None at the end."""
        try:
            while True:
                self._answers.put(pickle.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._answers.put(None)

    def _receive(self) -> Any:
        answer = self._answers.get()
        if answer is None:
            self._answers.put(None)
            raise RuntimeError("the process that reads the training data has died")
        return answer


def _serve(loader: Loader, pipe: Connection, parents: Connection) -> None:
    """Answer until told to stop: batches with the state after them, or the error in a batch's place."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which stops this process in the end
    torch.set_num_threads(1)
    while True:
        try:
            kind, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        if kind == "stop":
            return
        result: Any = None
        try:
            if kind == "batch":
                result = loader.batch(value)
            else:
                loader.load_state_dict(value)
        except Exception as error:
            result = error
        try:
            pipe.send_bytes(pickle.dumps((result, loader.state_dict())))
        except OSError:
            return
