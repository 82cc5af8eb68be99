"""The two ends of the wire against peers that do not keep to it."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from miniinfer import __version__
from miniinfer.bench.fake_model import tokenizer_json
from miniinfer.child import Child, exit_reason
from miniinfer.config import EngineArgs
from miniinfer.engine_link import EngineLink
from miniinfer.errors import EngineDeadError
from miniinfer.wire import DEAD, PROTOCOL, READY, REPLY, UTILITY, Hello, Reply, Utility, paths

PATIENCE_MS = 60_000

LIMITS = {
    "vocab_size": 50,
    "block_size": 4,
    "num_blocks": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 100,
}


def hello(**fields: Any) -> bytes:
    values: dict[str, Any] = {
        "protocol": PROTOCOL,
        "version": __version__,
        "model_name": "toy",
        "eos_token_ids": [1],
        "default_sampling_params": {},
        "limits": LIMITS,
    }
    return bytes([READY]) + msgspec.msgpack.encode(Hello(**(values | fields)))


class Peer:
    """An engine by hand."""

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        inward, outward = paths(folder, 0, 0)
        self.messages = context.socket(zmq.DEALER)
        self.frames = context.socket(zmq.PUSH)
        for socket, address in ((self.messages, inward), (self.frames, outward)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
        self.messages.send(b"")

    def close(self) -> None:
        self.messages.close()
        self.frames.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def link(context: zmq.Context[Any], tmp_path: Path) -> Iterator[EngineLink]:
    link = EngineLink(
        context,
        tmp_path,
        0,
        0,
        lambda: tokenizer_json(50),
        owned=False,
        max_backlog=1024,
        stall_limit=60.0,
    )
    yield link
    link.close()


@pytest.fixture
def peer(context: zmq.Context[Any], tmp_path: Path, link: EngineLink) -> Iterator[Peer]:
    peer = Peer(context, tmp_path)
    yield peer
    peer.close()


def wait_for(link: EngineLink, condition: Any) -> None:
    while not condition():
        link.wait()
        link.look()


def make_ready(link: EngineLink, peer: Peer) -> None:
    peer.frames.send(hello())
    wait_for(link, lambda: link.is_ready)


PARAMS: Any = {"temperature": 0.0}


class TestLink:
    def test_an_engine_of_another_version(self, link: EngineLink, peer: Peer) -> None:
        loading = link.error
        peer.frames.send(hello(version="0.0.0"))
        wait_for(link, lambda: link.error != loading)
        assert "version 0.0.0" in (link.error or "")

    def test_another_engine_with_other_limits(self, link: EngineLink, peer: Peer) -> None:
        make_ready(link, peer)
        peer.frames.send(hello(limits=LIMITS | {"max_model_len": 50}))
        wait_for(link, lambda: not link.is_ready)
        assert "other limits" in (link.error or "")

    @pytest.mark.parametrize(
        "frame",
        [b"", b"\x00", b"\x01\x00", b"\x63", bytes([READY]) + b"\xff", bytes([REPLY, 0xC1])],
        ids=repr,
    )
    def test_a_frame_that_is_none(self, link: EngineLink, peer: Peer, frame: bytes) -> None:
        make_ready(link, peer)
        assert link.frontend is not None
        submission = link.frontend.submit([3, 4], PARAMS)
        peer.frames.send(frame)
        wait_for(link, lambda: not link.is_ready)
        assert "not understood" in (link.error or "")
        link.make_text()
        [(_, delta)] = link.drain()
        assert delta.finish_reason == "error"
        assert "not understood" in (delta.error or "")
        submission.close()

    def test_noise_leaves_it_alive_or_dead_but_whole(self, link: EngineLink, peer: Peer) -> None:
        draw = random.Random(7)
        make_ready(link, peer)
        for _ in range(300):
            peer.frames.send(draw.randbytes(draw.randrange(60)))
        peer.frames.send(bytes([DEAD]) + "at an end \U0001f600".encode())
        wait_for(link, lambda: (link.error or "").startswith("at an end"))
        # And another in its place.
        peer.messages.send(b"")
        make_ready(link, peer)
        assert link.frontend is not None
        link.frontend.submit([3, 4], PARAMS)
        link.send()
        kind, message = peer.messages.recv_multipart()
        assert kind == b"\x00"
        assert bytes([3, 0, 0, 0, 4, 0, 0, 0]) in msgspec.msgpack.decode(message)

    def test_questions(self, link: EngineLink, peer: Peer) -> None:
        with pytest.raises(EngineDeadError, match="loading"):
            link.ask("ping", print)
        make_ready(link, peer)
        answers: list[str | None] = []
        for _ in range(3):
            link.ask("check", answers.append)
            kind, message = peer.messages.recv_multipart()
            assert kind == bytes([UTILITY])
        asked = msgspec.msgpack.decode(message, type=Utility)
        for error in (None, "twice"):
            peer.frames.send(bytes([REPLY]) + msgspec.msgpack.encode(Reply(asked.call, error)))
        wait_for(link, lambda: answers)
        assert answers == [None]
        peer.close()
        wait_for(link, lambda: not link.is_ready)
        # Who still waited is told.
        assert answers == [None, link.error, link.error]

    def test_a_peer_that_goes_is_missed(self, link: EngineLink, peer: Peer) -> None:
        make_ready(link, peer)
        peer.frames.setsockopt(zmq.LINGER, PATIENCE_MS)
        peer.frames.send(bytes([DEAD]) + b"the device is gone")
        peer.close()
        wait_for(link, lambda: not link.is_ready)
        assert link.error == "the device is gone"


class Client:
    """A client by hand."""

    def __init__(self, context: zmq.Context[Any], folder: Path, number: int, child: Child) -> None:
        inward, outward = paths(folder, number, 0)
        self.messages = context.socket(zmq.ROUTER)
        self.frames = context.socket(zmq.PULL)
        for socket, address in ((self.messages, inward), (self.frames, outward)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
            socket.bind(address)
        child.tell(client=number, folder=str(folder))
        self.identity = self.messages.recv_multipart()[0]
        assert self.frames.recv()[0] == READY

    def send(self, *frames: bytes) -> None:
        self.messages.send_multipart([self.identity, *frames])

    def expect(self, kind: int) -> bytes:
        while (frame := self.frames.recv())[0] != kind:
            pass
        return bytes(frame[1:])

    def ping(self) -> None:
        self.send(bytes([UTILITY]), msgspec.msgpack.encode(Utility(5, "ping")))
        reply = msgspec.msgpack.decode(self.expect(REPLY), type=Reply)
        assert reply == Reply(5, None)

    def close(self) -> None:
        self.messages.close()
        self.frames.close()


def test_an_engine_and_clients_that_do_not_keep_to_it(
    tiny_model: Path, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    ended = threading.Event()
    child = Child("miniinfer.engine_process", lambda code: ended.set())
    args = EngineArgs(model=str(tiny_model), num_kv_blocks=64, max_model_len=64, threads=1)
    with contextlib.ExitStack() as stack:
        stack.callback(child.close, 0.0)
        child.tell(args=args.as_dict(), engine=0, log_level=50)
        sound = Client(context, tmp_path, 0, child)
        stack.callback(sound.close)
        draw = random.Random(3)
        for number, frames in enumerate(
            [
                (b"",),
                (b"\x00\x00", b""),
                (b"\x00", b"", b""),
                (b"\x00", b"\xff"),
                (b"\x4d", b""),
                (bytes([UTILITY]), msgspec.msgpack.encode(Utility(1, "os.remove"))),
                *((bytes([draw.randrange(5)]), draw.randbytes(1 + 8 * i)) for i in range(4)),
            ],
            start=1,
        ):
            rogue = Client(context, tmp_path, number, child)
            rogue.send(*frames)
            assert b"did not understand" in rogue.expect(DEAD)
            rogue.close()
            sound.ping()
        assert not ended.is_set()
    assert ended.wait(PATIENCE_MS / 1000)


def test_how_a_process_ended() -> None:
    assert exit_reason("it", 3) == "it has exited with code 3"
    assert exit_reason("it", -9) == "it was killed by SIGKILL"
    assert exit_reason("it", -999) == "it was killed by signal 999"
