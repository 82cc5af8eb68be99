"""An engine whose forward pass sleeps while a file is there: `python -m hanging_engine`."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from miniinfer import engine_process


def load(args: dict[str, Any]) -> Any:
    """The engine of these settings."""
    engine: Any = engine_process.load(args)
    compute = engine.runner.run

    def run(buffers: Any) -> None:
        while Path(os.environ["HANG_WHILE"]).exists():
            time.sleep(0.1)
        compute(buffers)

    engine.runner.run = run
    return engine


if __name__ == "__main__":
    code = engine_process.run(sys.argv[1:], load)
    logging.shutdown()
    os._exit(code)
