"""The model that most plans are counted for by hand."""

import pytest

from vapo_megatron.models.known import known_shape


@pytest.fixture
def shape():
    return known_shape("Qwen2.5-32B")
