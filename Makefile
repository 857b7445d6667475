# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets; bench/ has its own.
.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*## .*/\1/p' Makefile)

RUN := .venv/bin/python
QUIET := VLLM_LOGGING_LEVEL=ERROR $(RUN)
GPU_PYTHON ?= python3

help: ## list the targets; `make -C bench help` lists those of the studies
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: .venv/installed ## crawl and search real documentation into a real vLLM, streaming and not; prints and draws it
	$(RUN) examples/demo.py

serve: .venv/installed ## ask streamrag's own documentation in the browser, at http://127.0.0.1:8080/; the first start takes minutes
	$(RUN) -m streamrag serve --demo

test: .venv/installed check ## types, style and all tests but the long ones
	$(RUN) -m pytest -n 3 --max-worker-restart 0 -m "not long"

test-long: .venv/installed .venv-voice/installed ## tests that take minutes: the whole demo, and, in .venv-voice, the adapters for LiveKit Agents and Pipecat
	$(RUN) -m pytest -m long
	.venv-voice/bin/python -m pytest -q tests/adapters/test_voice_listener.py tests/adapters/test_livekit.py tests/adapters/test_pipecat.py
	.venv-voice/bin/python -m pytest -q tests/test_docs.py -k voice

check: .venv/installed ## types and style
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

api: .venv/installed ## docs/api/, from signatures and docstrings, and the tables of the service's settings
	$(RUN) scripts/api.py
	$(RUN) scripts/settings_tables.py

docs: .venv/installed api ## the documentation as a site, build/site/index.html, which opens from disk
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

dist: .venv/installed ## wheel and sdist in dist/, and the wheel tried with each Python, away from the checkout
	$(RUN) scripts/try_wheel.py

OF ?= scheduler sessions serve
fuzz: .venv/installed $(if $(filter lanes,$(OF)),.venv/nixl-installed) ## random loads: the scheduler against its KV oracle, sessions, every interface of the service; OF=lanes: engines that are killed, NIXL, most of an hour
	$(if $(filter scheduler,$(OF)),$(QUIET) -m tests.engine.fuzz --first 0 --seeds 20000)
	$(if $(filter scheduler,$(OF)),$(QUIET) -m tests.engine.fuzz --first 1000000 --seeds 4000)
	$(if $(filter sessions,$(OF)),$(QUIET) -m tests.sessions.fuzz --first 0 --seeds 2000)
	$(if $(filter serve,$(OF)),$(RUN) -m pytest -q --hypothesis-profile=fuzz --timeout=0 tests/serve/test_serve_fuzz.py)
	$(if $(filter lanes,$(OF)),$(QUIET) -m tests.backends.lanes.lane_schedules --first 0 --seeds 200)
	$(if $(filter lanes,$(OF)),$(QUIET) -m tests.backends.lanes.lane_kills --first 0 --seeds 10)

mutants: .venv/installed ## breaks the scheduler, and sessions, in one line each, and shows that the fuzz notices
	$(QUIET) -m tests.engine.mutants
	$(QUIET) -m tests.sessions.mutants

vllm: .venv/installed ## VERSION=0.33.0: the scheduler with the sources of a release: fingerprints, vLLM's own tests, 20,000 random loads, faults, 60 cells of `make paper`; an hour or two
	$(RUN) scripts/vllm_release.py $(VERSION) --record

paper: ## the paper's tables and figures beside ours, and what beats them, simulated: bench/studies/paper/README.md, under 40 minutes of two idle cores, resumable
	$(MAKE) -C bench paper

gpu: ## with GPU_PYTHON=python3, which has vLLM for CUDA, a quarter of an hour: copies, exactness, loads beside the simulator; resumable; results in $$OUT; WHEELS=FOLDER installs from there
	$(if $(WHEELS),$(GPU_PYTHON) -m pip install --no-index --find-links $(WHEELS) --editable '.[vllm]' --editable bench)
	cd bench && $(GPU_PYTHON) -m studies.gpu.run

clean: ## remove what the targets made
	rm -rf .venv .venv-voice .uv .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/installed: pyproject.toml bench/pyproject.toml scripts/install.sh
	scripts/install.sh

.venv/nixl-installed: .venv/installed
	scripts/install.sh nixl

.venv-voice/installed: pyproject.toml scripts/install.sh
	scripts/install.sh voice
