"""Packaging of relax_hpc: a small, torch-free base (CLI, configuration, queue controller) and
extras for the rest."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
BASE = [
    "jsonargparse[signatures]>=4.40",
    "docstring-parser>=0.16",
    "PyYAML>=6",
    "numpy>=1.26",
    "msgpack>=1",
    "xxhash>=3",
    "zstandard>=0.22",
    "h5py>=3.10",
    "tensorboard>=2.15",
    "psutil>=5.9",
    "jinja2>=3",
    "markdown-it-py>=3",
]
EXTRAS = {
    "train": ["torch>=2.11", "megatron-core==0.16.1", "mpi4py>=4", "safetensors>=0.5"],
    "sglang": [
        "sglang==0.5.21",
        "transformers==5.12.1",
        "tokenizers==0.22.2",
        "aiohttp",
        "orjson",
        "tqdm",
    ],
    "rdma": ["nixl-cu12>=1.5; sys_platform == 'linux'"],
    # PyAV 16.1.0 crashes when it opens an MPEG program stream.
    "omni": [
        "pillow",
        "decord2>=3.4",
        "av>=18",
        "librosa",
        "soundfile",
        "soxr",
        "scipy",
        "numba==0.65.1",
    ],
    "slurm": ["submitit>=1.5"],
    "plot": ["matplotlib>=3.8"],
    "parquet": ["pyarrow>=15"],
    "games": ["gymnasium>=1"],
    "math": ["math-verify[antlr4_13_2]>=0.9", "sympy>=1.13"],
    "dev": [
        *("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6"),
        *("ruff>=0.12", "packaging", "mkdocs>=1.6", "mkdocs-material>=9.6"),
    ],
}
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})
# Not among all: some of what it needs has no wheels.
EXTRAS["puzzles"] = ["reasoning_gym>=0.1.25"]
# Not among all: trackers are optional, and trackio needs another release of pillow.
EXTRAS["wandb"] = ["wandb>=0.31"]
EXTRAS["trackio"] = ["trackio>=0.43"]
EXTRAS["mlflow"] = ["mlflow-skinny>=3.17"]
# Not among all: the use, power and errors of NVIDIA's GPUs are optional.
EXTRAS["nvml"] = ["nvidia-ml-py>=12"]


def long_description() -> str:
    """The README when it is there; an sdist without it still builds."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="relax_hpc",
    version="0.2.0",
    description="Reinforcement-learning post-training of omni-modal language models on Slurm "
    "clusters",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["relax_hpc", "relax_hpc.*"]),
        "relax_hpc.configs",
        "relax_hpc.examples.tasks",
        "relax_hpc.templates",
    ],
    # These folders lie at the top level, where users look for them; in a checkout they are found
    # there.
    package_dir={
        "relax_hpc.configs": "configs",
        "relax_hpc.examples": "examples",
        "relax_hpc.templates": "slurm",
    },
    package_data={
        "relax_hpc": ["py.typed"],
        "relax_hpc.templates": ["*.j2"],
        "relax_hpc.configs": ["*/*.yaml", "models/*/config.json"],
        "relax_hpc.ops.observe": ["*.html", "*.css", "*.js"],
        "relax_hpc.service.page": ["assets/*"],
    },
    include_package_data=False,
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["relax-hpc = relax_hpc.commands.program:main"]},
)
