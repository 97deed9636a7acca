"""Packages: those under jrl/; configs/, which is installed as jrl/configs; and the built documentation as jrl/site.

All else is in pyproject.toml. `make wheel` builds the documentation first; without build/site a wheel has none.
"""

from pathlib import Path

from setuptools import find_packages, setup

site = {"jrl.site": "build/site"} if Path("build/site/index.html").is_file() else {}

setup(
    packages=[*find_packages(include=["jrl", "jrl.*"]), "jrl.configs", *site],
    package_dir={"jrl.configs": "configs", **site},
    package_data={
        "jrl": ["py.typed"],
        "jrl.auto": ["rules.yaml"],
        "jrl.report": ["assets/*"],
        "jrl.serve": ["client.js"],
        "jrl.zoo": ["*.zip", "entries.json"],
        "jrl.configs": ["*.yaml"],
        "jrl.site": ["**"],
    },
)
