"""Packages of the wheel. ``configs/`` and ``slurm/`` stay where users look for them, and the wheel
has the same files as ``nemo_like/recipes``; all else is in ``pyproject.toml``."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["nemo_like*"]),
        "nemo_like.recipes",
        "nemo_like.recipes.slurm",
    ],
    package_dir={"nemo_like.recipes": "configs", "nemo_like.recipes.slurm": "slurm"},
    package_data={
        "nemo_like": ["py.typed", "models/embedded/*", "compose/names.txt", "viewer/page/*"],
        "nemo_like.recipes": ["*.yaml", "*/*.yaml"],
        "nemo_like.recipes.slurm": ["*.sbatch"],
    },
)
