"""The HTTP server: OpenAI-compatible routes over one engine, answered whole or as SSE streams.

`app.make_app` builds the aiohttp application, `run.serve` binds, loads, serves and drains.
"""
