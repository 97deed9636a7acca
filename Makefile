# make train | test | test-all | lint | test-slow | bench | matrix: each makes .venv on first use.
# make site: the documentation as pages in build/site, by an environment of its own in build/site-venv.
# make wheel: the package with the documentation in dist/, which `jrl docs` serves.
# make test-extras: a new environment without constraints, as a user's.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test test-all test-extras lint test-slow bench matrix site wheel

# what a run needs; the development packages are another gigabyte
$(BIN)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(BIN)/.installed: $(BIN)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

train: $(BIN)/.base
	$(BIN)/python -m jrl.train configs/ppo.yaml

test: $(BIN)/.installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not slow" -n 3 --dist loadfile --no-loadscope-reorder

test-all: $(BIN)/.installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-extras:
	$(PYTHON) scripts/try_extras.py

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-slow: $(BIN)/.installed
	$(BIN)/python scripts/bench_learning.py --out runs/learning-$(shell date +%Y%m%d-%H%M%S)

bench: $(BIN)/.installed
	$(BIN)/python scripts/bench_speed.py --out runs/speed.jsonl

matrix: $(BIN)/.installed
	$(BIN)/python scripts/matrix.py --write docs/matrix.md

# without jrl and jax: mkdocstrings reads sources
build/site-venv/.installed: pyproject.toml
	$(PYTHON) -m venv build/site-venv
	build/site-venv/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > build/site-venv/requirements.txt
	build/site-venv/bin/python -m pip install --quiet --disable-pip-version-check -r build/site-venv/requirements.txt
	touch $@

site: build/site-venv/.installed
	NO_MKDOCS_2_WARNING=1 build/site-venv/bin/mkdocs build --strict
	build/site-venv/bin/python scripts/api_pages.py --check build/site

wheel: site
	rm -rf build/lib  # an earlier build, whose removed modules would be in the wheel
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
