"""Packages: those under jrl/, and configs/, which is installed as jrl/configs. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jrl", "jrl.*"]), "jrl.configs"],
    package_dir={"jrl.configs": "configs"},
    package_data={
        "jrl": ["py.typed"],
        "jrl.auto": ["rules.yaml"],
        "jrl.report": ["assets/*"],
        "jrl.serve": ["client.js"],
        "jrl.configs": ["*.yaml"],
    },
)
