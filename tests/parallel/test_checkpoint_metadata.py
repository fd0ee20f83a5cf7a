"""What a checkpoint's metadata may name: an Enum's member, however a Python version pickles it."""

import enum
import io
import pickle

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from vapo_megatron.parallel.checkpoint_metadata import _member, _Unpickler


class _Call:
    """Pickled as a call of getattr, as Python before 3.11.4 does with an Enum's member."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_a_member_of_an_enum_is_read():
    member = next(iter(_MEM_FORMAT_ENCODING))
    written = pickle.dumps(_Call(_MEM_FORMAT_ENCODING, member.name))
    assert _Unpickler(io.BytesIO(written)).load() is member


@pytest.mark.parametrize("arguments", [(_MEM_FORMAT_ENCODING, "__class__"), ("text", "upper")])
def test_no_other_attribute_is(arguments):
    with pytest.raises(pickle.UnpicklingError, match="it names an attribute"):
        _Unpickler(io.BytesIO(pickle.dumps(_Call(*arguments)))).load()
    with pytest.raises(pickle.UnpicklingError):
        _member(enum.Enum, "mro")
