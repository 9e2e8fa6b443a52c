"""A TCP connection that a test can cut and restore."""

import contextlib
import socket
import threading
from typing import Self


class Relay:
    """Listens on loopback and forwards both directions of a connection to another port."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = True
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        """Start to accept connections."""
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop accepting connections."""
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Close all connections; new ones are closed at once."""
        with self._lock:
            self._open = False
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._ends.clear()

    def mend(self) -> None:
        """Forward again."""
        with self._lock:
            self._open = True

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    if self._open:
                        far = socket.create_connection(("127.0.0.1", self._target))
                        self._ends += [near, far]
                        self._threads.append(threading.Thread(target=_carry, args=(near, far)))
                        self._threads[-1].start()
                    else:
                        near.close()


def _carry(near: socket.socket, far: socket.socket) -> None:
    with near, far:
        back = threading.Thread(target=_pump, args=(far, near))
        back.start()
        _pump(near, far)
        back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(65536):
            sink.sendall(block)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
