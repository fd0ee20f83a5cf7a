"""Packages of environments that the test environment has not, in a folder that outlives tests."""

import subprocess
import sys
from pathlib import Path

GEM = ("gem-llm==0.1.0",)
SKYRL_GYM = ("skyrl-gym==0.4.0", "omegaconf==2.4.0", "pandas==3.1.1")
OPENENV = (
    "openenv==0.10.0", "fastmcp==3.4.11", "fastmcp-slim==3.4.11", "mcp==1.30.0",
    "aiofile==3.12.3", "Authlib==1.9.10", "backports.tarfile==1.2.0", "beartype==0.23.1",
    "caio==0.12.10", "cyclopts==5.5.2", "exceptiongroup==1.3.2", "griffelib==2.4.1",
    "httpx-sse==0.4.3", "importlib_metadata==10.2.0", "jaraco.classes==3.4.0",
    "jaraco.context==6.1.2", "jaraco.functools==4.6.0", "jeepney==0.9.0", "joserfc==1.8.0",
    "jsonref==1.1.0", "jsonschema-path==0.5.0", "keyring==25.7.0", "lazy-importer==0.1.0",
    "more-itertools==11.2.1", "openapi-pydantic==0.6.0", "pathable==0.6.0",
    "py-key-value-aio==0.4.6", "pyperclip==1.11.0", "rich-rst==2.2.0", "SecretStorage==3.5.0",
    "uncalled-for==0.6.2", "zipp==4.1.2",
)  # fmt: skip


def installed(config, name, pins):
    """Return a directory with these packages alone; they are downloaded if they are not there."""
    directory = Path(config.cache.mkdir(f"packages_{name}"))
    stamp = directory / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(pins):
        command = [
            sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check",
            "--no-deps", "--ignore-requires-python", "--upgrade", "--target", str(directory), *pins,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (
            f"these tests need {', '.join(pins)} from a package index: {done.stderr}"
        )
        stamp.write_text(" ".join(pins))
    return directory
