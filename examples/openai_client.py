"""Talk to a running server with nothing but Python's standard library.

    miniinfer serve &
    python examples/openai_client.py "Why is the sky blue?"

The rules of a client: what the network delivers is not an event, and an event is not a token; lines
that are not `data:` are skipped; only `[DONE]` ends an answer well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream until `[DONE]`; an answer that just stops is an error."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        yield event
    raise RuntimeError("the stream ended before [DONE]")


def open_url(url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the response to a GET, or to a POST of JSON."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("MINIINFER_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, headers))
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(json.loads(error.read())["error"]["message"]) from error


def ask(url: str, question: str, max_tokens: int) -> None:
    """Ask one question and print the answer as it comes."""
    with open_url(f"{url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage = None
    with open_url(f"{url}/v1/chat/completions", body) as response:
        for event in events(response):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
    print()
    if usage is not None:
        print(f"{usage['completion_tokens']} tokens from {model}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and ask."""
    parser = argparse.ArgumentParser(description="Ask a running server one question.")
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args(argv)
    try:
        ask(arguments.url.rstrip("/"), arguments.question, arguments.max_tokens)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
