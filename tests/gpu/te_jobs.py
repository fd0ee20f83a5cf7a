"""What the processes with te_site.py's Transformer Engine do; most functions are one job.

`layers()` makes the code under test take a GPU's path for the layers, and for nothing else: the
device stays the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from importlib import metadata
from unittest import mock

from tests.parallel import training
from tests.roles import test_frozen_attention
from tests.run.checkpoint import test_load
from tests.weights.tiny_hf import FAMILIES, write_tiny_hf
from tools.smoke.sizes import SMALL


@contextlib.contextmanager
def layers():
    """Transformer Engine's layers wherever a GPU would have them, with the fused rotation."""
    from vapo_megatron.models import build, layer_spec

    cuda = types.SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0))
    fusions = build._fusions
    with (
        mock.patch.object(layer_spec, "torch", types.SimpleNamespace(cuda=cuda)),
        mock.patch.object(build, "_fusions", lambda on_gpu, te: fusions(True, te)),
    ):
        yield


@contextlib.contextmanager
def configured(module, **fields):
    """Let a module's make_config return these fields of `model`, whatever the rules say."""
    honest = module.make_config

    def make_config(*arguments, **sections):
        config = honest(*arguments, **sections)
        return config.model_copy(update={"model": config.model.model_copy(update=fields)})

    with mock.patch.object(module, "make_config", make_config):
        yield


def taken():
    """Return which modules megatron-core's pieces come from."""
    import vapo_megatron.parallel  # noqa: F401

    # isort: split
    from megatron.core import optimizer
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer

    kernels = clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl
    rotations = (rope_utils.fused_apply_rotary_pos_emb, rope_utils.fused_apply_rotary_pos_emb_thd)
    return {
        "version": metadata.version("transformer-engine"),
        "HAVE_TE": extension.HAVE_TE,
        "Adam": [
            f"{adam.__module__}.{adam.__name__}"
            for adam in (optimizer.Adam, distrib_optimizer.Adam)
        ],
        "torch's optimizer": optimizer.USING_PYTORCH_OPTIMIZER,
        "rotations": [rotation and rotation.__module__ for rotation in rotations],
        "norm and scale": [kernel.__module__ for kernel in kernels],
    }


def unknown_keywords():
    """Return, of what is passed by name, what Transformer Engine does not know, by callee."""
    import vapo_megatron.parallel  # noqa: F401

    # isort: split
    import transformer_engine.pytorch as te
    from megatron.core.packed_seq_params import PackedSeqParams
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    # megatron-core takes two of the fields for itself.
    packing = {f.name for f in dataclasses.fields(PackedSeqParams)} - {"cp_group", "local_cp_size"}
    linear = {
        "in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation", "tp_group",
        "tp_size", "get_rng_state_tracker", "init_method", "bias", "return_bias", "params_dtype",
        "parallel_mode", "device",
    }  # fmt: skip
    passed = {
        te.DotProductAttention.forward: {*packing, "attn_mask_type"},
        te.DotProductAttention.__init__: {
            "num_attention_heads", "kv_channels", "attention_dropout", "attn_mask_type", "tp_group",
            "sequence_parallel", "tp_size", "get_rng_state_tracker", "layer_number",
            "num_gqa_groups", "attention_type", "softmax_scale",
        },
        te.Linear.__init__: {*linear, "rng_tracker_name"},
        te.LayerNormLinear.__init__: {*linear, "eps", "normalization", "zero_centered_gamma"},
        te.Linear.forward: {"is_first_microbatch"},
        te.LayerNormLinear.forward: {"is_first_microbatch"},
        te.optimizers.FusedAdam.__init__: {
            "params", "lr", "weight_decay", "betas", "eps", "adam_w_mode", "capturable",
        },
        apply_rotary_pos_emb: {"tensor_format", "fused", "cu_seqlens", "cp_size", "cp_rank"},
        recipe.Float8CurrentScaling: {"fp8_format", "fp8_dpa"},
        te.fp8_autocast: {"enabled", "fp8_recipe", "fp8_group"},
    }  # fmt: skip
    return {
        function.__qualname__: unknown
        for function, names in passed.items()
        if (unknown := names - set(inspect.signature(function).parameters))
    }


def built(directory):
    """Build each family's roles with both kinds of layers; see `described`.

    Returns: (family, tied, role) -> {layer_spec: description}.
    """
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups

    groups.initialize(training.make_config(training.Layout()).parallel)
    found = {}
    for family in FAMILIES:
        for tied in (False, True):
            path = directory / f"{family} {tied}"
            shape = read_model_shape(write_tiny_hf(path, family=family, tied=tied, num_layers=2))
            for role in ("actor", "critic"):
                found[family, tied, role] = {
                    spec: described(shape, role, spec) for spec in ("transformer_engine", "local")
                }
    return found


def described(shape, role, spec):
    """Return the parameters' names, their matches in the name table, and what accumulates.

    matched: HF names -> shape of the parameter. wanted: every HF name. accumulate: before and after
    build_ddp, name of each module with fuse_wgrad_accumulation -> its value.
    """
    from vapo_megatron.models.build import build_model
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.optimizer import build_ddp
    from vapo_megatron.weights.parameters import local_parameters
    from vapo_megatron.weights.table import hf_tensors

    with layers(), configured(training, layer_spec=spec):
        config = training.make_config(training.Layout())
        ranks = groups.current()
        chunks = build_model(shape, config.model, config.parallel, ranks, role, seed=0)

    def accumulate():
        name = "fuse_wgrad_accumulation"
        modules = chunks[0].named_modules()
        return {path: getattr(m, name) for path, m in modules if hasattr(m, name)}

    before = accumulate()
    build_ddp(chunks, config.parallel, chunks[0].config)
    return {
        "names": [name for name, _ in chunks[0].named_parameters()],
        "matched": {p.hf_names: tuple(p.data.shape) for p in local_parameters(chunks, shape, role)},
        "wanted": list(hf_tensors(shape, role)),
        "accumulate": (before, accumulate()),
    }


def on_meta(hf_path):
    """Build an actor without memory."""
    from vapo_megatron.models.build import build_model
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups

    with layers(), configured(training, layer_spec="transformer_engine"):
        config = training.make_config(training.Layout())
        ranks = groups.initialize(config.parallel)
        shape = read_model_shape(hf_path)
        build_model(shape, config.model, config.parallel, ranks, "actor", seed=0, device="meta")


def train(hf_paths, layout):
    """Updates of tests/parallel/training.py in float32."""
    with layers(), configured(training, layer_spec="transformer_engine"):
        return training.run_layout(hf_paths, layout)


def one_microbatch(hf_path):
    """Run an actor forward and backward once.

    Returns: the parameters whose gradients the layers themselves added to DDP's buffer, and how
    often each kernel was called.
    """
    import transformer_engine_torch as extension

    from vapo_megatron.parallel import groups

    layout = training.Layout(split=(((0,),),))
    with layers(), configured(training, layer_spec="transformer_engine"):
        config = training.make_config(layout)
        groups.initialize(config.parallel)
        trained = training.Trained(hf_path, layout, "actor", config)
    kernels = (
        "generic_gemm", "fused_rope_forward", "fused_rope_backward", "fused_attn_fwd",
        "fused_attn_bwd",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        called = {
            name: stack.enter_context(
                mock.patch.object(extension, name, wraps=getattr(extension, name))
            )
            for name in kernels
        }
        trained.forward_backward()
    named = trained.model[0].named_parameters()
    added = [name for name, parameter in named if parameter.grad_added_to_main_grad]
    return added, {name: kernel.call_count for name, kernel in called.items()}


def learn_with_frozen_attention(*arguments):
    """tests/roles/test_frozen_attention.py's job, with offload and a checkpoint."""
    with layers(), configured(test_frozen_attention, layer_spec="transformer_engine"):
        test_frozen_attention.learn(*arguments)


def save_or_resume(*arguments):
    """tests/run/checkpoint/test_load.py's job, in bfloat16 with model.layer_spec=auto."""
    import transformer_engine_torch as extension

    attend = extension.fused_attn_fwd
    with layers(), mock.patch.object(extension, "fused_attn_fwd", wraps=attend) as attention:
        found = test_load.train(*arguments)
    assert attention.called, "auto chose other layers"
    return found


def smoke(directory):
    """Return the rows of tools/gpu_smoke.py's section te, at the CPU's sizes."""
    from tools.smoke import te

    with layers():
        rows = [te.packed_attention(c, te.attention_layer(c)) for c in SMALL.attention]
        return rows + te.updates(SMALL, directory, "transformer_engine", "local")


def fp8(hf_path):
    """Return the recipe in whose context megatron-core runs layers under model.fp8."""
    from vapo_megatron.models.build import transformer_config
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups

    # isort: split
    from megatron.core.fp8_utils import get_fp8_context
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with layers(), configured(training, layer_spec="transformer_engine", fp8="hybrid"):
        config = training.make_config(training.Layout())
        groups.initialize(config.parallel)
        settings = transformer_config(read_model_shape(hf_path), config.model, config.parallel)
    with get_fp8_context(settings, 0):
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        return FP8GlobalStateManager.is_fp8_enabled(), type(recipe).__name__, recipe.fp8_dpa
