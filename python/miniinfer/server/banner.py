"""What the server prints when it is ready."""

from __future__ import annotations

import json
from typing import Any

from .config import ServerConfig
from .engine_api import Engine


def banner(engine: Engine, config: ServerConfig, address: tuple[Any, ...]) -> str:
    """Return the model, its context, where it listens, and a command to try."""
    names = config.served_model_names or (engine.model_name,)
    url = base_url(config.host, address[1], "http" if config.tls_cert is None else "https")
    stats = engine.stats()
    lines = [f"model    {', '.join(names)}", f"context  {engine.max_model_len} tokens"]
    if "kv_cache_tokens" in stats:
        lines.append(f"KV cache {stats['kv_cache_tokens']} tokens")
    lines += [f"listens  {url}", "", "try:", _curl(url, names[0], bool(config.api_keys))]
    return "\n".join(lines)


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL that a client on this machine can use."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    if ":" in reachable and not reachable.startswith("["):
        reachable = f"[{reachable}]"
    return f"{scheme}://{reachable}:{port}"


def _curl(url: str, model: str, needs_key: bool) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 64,
        "stream": True,
    }
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    quoted = json.dumps(body).replace("'", "'\\''")
    return (
        f"  curl -N {url}/v1/chat/completions{key} "
        f"-H 'Content-Type: application/json' -d '{quoted}'"
    )
