"""Files of responses in a checkpoint: what each rank writes, and what all say of it together.

Not exercised: what is in them, see test_partial.py and tests/e2e/test_disaggregated.py.
"""

import errno
import hashlib
import os

import pytest

from vapo_megatron.errors import CheckpointError
from vapo_megatron.rollout.partial.files import IN_FLIGHT, all_sums, write_files

FILES = [(f"{IN_FLIGHT}/step_000003/a", b"one"), (f"{IN_FLIGHT}/step_000004/a", b"two")]


def test_all_ranks_files_have_their_sums(tmp_path):
    written = [write_files(tmp_path, files) for files in (FILES[:1], [], FILES[1:])]
    expected = {name: hashlib.sha256(content).hexdigest() for name, content in FILES}
    assert all_sums(written, tmp_path) == expected
    assert {name: (tmp_path / name).read_bytes() for name, _ in FILES} == dict(FILES)


def full(file):
    file.parent.mkdir(parents=True)
    file.symlink_to("/dev/full")


def in_the_way(file):
    file.parent.parent.mkdir()
    file.parent.touch()


@pytest.mark.parametrize(("spoil", "number"), [(full, errno.ENOSPC), (in_the_way, errno.EEXIST)])
def test_one_rank_that_cannot_write_is_an_error_of_all(tmp_path, spoil, number):
    spoil(tmp_path / FILES[0][0])
    written = [write_files(tmp_path, [one]) for one in FILES]
    assert [bool(problem) for problem, _ in written] == [True, False]
    why = os.strerror(number)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: responses cannot be written: {why}"):
        all_sums(written, tmp_path)
