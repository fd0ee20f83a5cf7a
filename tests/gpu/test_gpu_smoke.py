"""tools/gpu_smoke.py's sections on this machine's GPU, at small sizes; needs one (-m gpu).

Not exercised: the full sizes, which are the tool's own. Without a GPU, test_sections.py runs the
same functions on a CPU.
"""

import pytest
import torch

from tools import gpu_smoke


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU on this machine")
@pytest.mark.parametrize("name", gpu_smoke.SECTIONS)
def test_section(name, tmp_path, capfd):
    code = gpu_smoke.main(["--small", "--sections", name, "--out", str(tmp_path)])
    log = (tmp_path / "gpu_smoke.log").read_text()
    assert code == 0, f"{capfd.readouterr().out}\n{log[-4000:]}"
