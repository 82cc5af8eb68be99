"""What the system alone takes for the streams of `serve.py`: a server that only sends.

`python -m benches.serve_floor COUNT` accepts so many clients and sends each the same event, as long
as one that a completion is streamed in, at the pace of the bench. It reads no request, makes no
text and runs no engine: what it costs, no server can go below that sends an event for each token.
"""

import socket
import sys
import time

from benches.serve_engine import RATE

from miniinfer._core import send_each

_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1700000000,"model":"tiny","system_fingerprint":"miniinfer-0.1.0",'
    b'"choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":null}]}\n\n'
)


def main(count: int) -> None:
    """Send until all clients have gone; the address is on standard output."""
    chunk = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
        print(listener.getsockname()[1], flush=True)
        clients = [listener.accept()[0] for _ in range(count)]
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    batch = [(client.fileno(), chunk) for client in clients]
    due = time.monotonic()
    while any(send_each(batch)):
        due = max(due + 1 / RATE, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
