"""The clients of `serve.py`: streams that only count, and note when something comes."""

import json
import select
import socket
import time

MAX_TOKENS = 4000
_PATIENCE_SECONDS = 10.0
_EVENT = b"data: {"


class Stream:
    """One client; it asks again when its answer is over."""

    def __init__(self, port: int, number: int) -> None:
        prompt = [60 + number % 60, 61, 62 + number % 7]
        body = json.dumps(
            {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.events = 0
        self.last: float | None = None
        self.socket.sendall(self._request)

    def read(self, gaps: list[float]) -> None:
        """Take in what is there, and add the time since the last of it."""
        piece = self.socket.recv(2**16)
        now = time.monotonic()
        if not piece:
            raise ConnectionError("the server has ended a stream")
        self.events += piece.count(_EVENT)
        if self.last is not None:
            gaps.append(now - self.last)
        self.last = now
        if piece.endswith(b"0\r\n\r\n"):
            self.last = None
            self.socket.sendall(self._request)


class Load:
    """So many streams at once, read by one thread."""

    def __init__(self, port: int, count: int) -> None:
        self._streams = {}
        self._poll = select.epoll()
        for number in range(count):
            stream = Stream(port, number)
            self._streams[stream.socket.fileno()] = stream
            self._poll.register(stream.socket, select.EPOLLIN)

    def read(self, seconds: float) -> list[float]:
        """Read for a time; return the times between what came, in seconds."""
        gaps: list[float] = []
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for descriptor, _ in self._poll.poll(left):
                self._streams[descriptor].read(gaps)
        return gaps

    def await_all(self) -> None:
        """Read until every stream has begun."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while any(not stream.events for stream in self._streams.values()):
            if time.monotonic() > end:
                raise TimeoutError(f"not all streams have begun in {_PATIENCE_SECONDS:g} s")
            self.read(0.1)

    @property
    def events(self) -> int:
        """Events so far."""
        return sum(stream.events for stream in self._streams.values())

    def close(self) -> None:
        """Leave."""
        for stream in self._streams.values():
            stream.socket.close()
        self._poll.close()


def get(port: int, path: str) -> dict[str, object]:
    """A JSON answer of the server's."""
    with socket.create_connection(("127.0.0.1", port), _PATIENCE_SECONDS) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
    found: dict[str, object] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found
