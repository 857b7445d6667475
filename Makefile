# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*## .*/\1/p' Makefile)

RUN := .venv/bin/python
GPU_PYTHON ?= python3

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 24

demo: .venv/installed ## crawl and search real documentation into a real vLLM, streaming and not; prints and draws it
	$(RUN) examples/demo.py

demo-figures: .venv/installed ## draw docs/timeline.svg, and put figures into texts, from experiments/results/demo.json
	$(RUN) scripts/demo_figures.py

demo-ray: .venv/installed ## two replicas on Ray Serve, one killed under load: what is lost, what is asked again; real engines, Linux, two minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/ray_replicas.py demo

demo-lanes: .venv/nixl-installed ## one query through two engines: one computes the prompt, the other answers; real engines, installs NIXL, two minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/lanes.py

serve: .venv/installed ## ask streamrag's own documentation in the browser, at http://127.0.0.1:8080/; the first start takes minutes
	$(RUN) -m streamrag serve --demo

notebook: .venv/installed ## run the notebook anew, and keep what it shows
	$(RUN) scripts/notebook.py

test: .venv/installed check ## types, style and all tests but the long ones
	$(RUN) -m pytest -n 2 --max-worker-restart 0 -m "not long"

test-long: .venv/installed ## the tests that take minutes: the whole demo
	$(RUN) -m pytest -m long

voice: .venv-voice/installed ## the adapters for LiveKit Agents and Pipecat, in an environment of their own, .venv-voice; two minutes
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

install-matrix: .venv/installed ## which extras go together on Python 3.11 to 3.13, and megabytes to download; ten minutes; INSTALL=--install runs docs/install.md too
	$(RUN) scripts/install_matrix.py $(INSTALL)

bench-stall: .venv/installed ## the event loop's worst stall while a crawl and a search run
	$(RUN) experiments/loop_stall.py

fuzz: .venv/installed ## the scheduler against its KV oracle: 20,000 random loads, some minutes on two cores
	VLLM_LOGGING_LEVEL=ERROR $(RUN) -m tests.engine.fuzz --first 0 --seeds 20000
	VLLM_LOGGING_LEVEL=ERROR $(RUN) -m tests.engine.fuzz --first 1000000 --seeds 4000

fuzz-serve: .venv/installed ## anything at all sent to the service's interfaces: 3,000 of each kind, five minutes
	$(RUN) -m pytest -q --hypothesis-profile=fuzz --timeout=0 tests/serve/test_serve_fuzz.py

fuzz-sessions: .venv/installed ## random sessions on vLLM's client and scheduler: is each answer that of one request? 2,000 loads, minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) -m tests.sessions.fuzz --first 0 --seeds 2000

fuzz-lanes: .venv/nixl-installed ## random queries through two prefill and two decode engines: is each answer that of a fresh request? 200 schedules, then 10 sets of engines that are killed; installs NIXL, most of an hour
	VLLM_LOGGING_LEVEL=ERROR $(RUN) -m tests.backends.lanes.lane_schedules --first 0 --seeds 200
	VLLM_LOGGING_LEVEL=ERROR $(RUN) -m tests.backends.lanes.lane_kills --first 0 --seeds 10

mutants: .venv/installed ## breaks the scheduler, and sessions, in one line each, and shows that the fuzz notices
	VLLM_LOGGING_LEVEL=ERROR $(RUN) -m tests.engine.mutants
	VLLM_LOGGING_LEVEL=ERROR $(RUN) -m tests.sessions.mutants

bench-serve: .venv/installed ## what HTTP costs, idle streams, goodput at twice saturation, a soak; scripted and real engine, eight minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/serve_load.py --json experiments/results/serve.json

bench-harnesses: .venv/installed ## `vllm bench serve`, and GUIDELLM=PROGRAM and AIPERF=PROGRAM of other environments, against our server and vLLM's; real engine, a quarter of an hour, resumable
	$(RUN) experiments/harnesses.py $(if $(GUIDELLM),--guidellm $(GUIDELLM)) $(if $(AIPERF),--aiperf $(AIPERF)) --json experiments/results/harnesses.json

bench-attacks: .venv/installed ## what one malicious client costs all others: latency and memory beside each attack; ten minutes, on a quiet machine
	$(RUN) -m experiments.attacks --json experiments/results/attacks.json

bench-engine: .venv/installed ## what a step and an update cost, then time to the first token in four arms, and on the recorded traces beside the simulator; real engine
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/engine_step.py
	$(RUN) experiments/engine_arms.py --json experiments/results/engine_arms.json
	$(RUN) experiments/engine_traces.py --json experiments/results/engine_traces.json

bench-validity: .venv/installed ## the same loads on the real engine and on its simulation: do they agree? twenty minutes
	$(RUN) experiments/validity.py --json experiments/results/validity.json

bench-advice: .venv/installed ## does a replay on the real engine confirm the advice of `streamrag advise` within 20 %? three traces, a quarter of an hour
	$(RUN) experiments/advice.py --json experiments/results/advice.json

bench-eviction: .venv/installed ## recompute, swap or what costs less, under memory pressure, simulated: hours, resumable
	$(RUN) experiments/eviction.py --json experiments/results/eviction.json

bench-eviction-engine: .venv/installed ## recompute, swap or what costs less on the real engine, and did costs come true? about 17 minutes
	$(RUN) experiments/eviction_engine.py --json experiments/results/eviction_engine.json --plot docs/decision-costs.png

bench-thrash: .venv/installed ## tokens computed twice when idle streams outgrow memory, ours and the paper's rule, simulated
	$(RUN) experiments/thrash.py --json experiments/results/thrash.json

bench-overlap: .venv/installed ## do steps take longer while KV is copied beside them? real engine, a few minutes
	$(RUN) experiments/copy_overlap.py --json experiments/results/copy_overlap.json

bench-rounding: .venv/installed ## log-probabilities of prompts computed whole, in pieces by vLLM, streamed: half an hour
	$(RUN) experiments/rounding.py --json experiments/results/rounding.json

vllm: .venv/installed ## VERSION=0.33.0: the scheduler with the sources of a release: fingerprints, vLLM's own tests, 20,000 random loads, faults, 60 cells of `make paper`; an hour or two
	$(RUN) scripts/vllm_release.py $(VERSION) --record

models: .venv/installed ## architectures of models on the real engine, streamed prompts beside fresh requests; ten minutes
	$(RUN) -m pytest -q tests/backends/vllm/test_architectures.py

gpu: ## with GPU_PYTHON=python3, which has vLLM for CUDA, a quarter of an hour: copies, exactness, loads beside the simulator; resumable; results in $$OUT; WHEELS=FOLDER installs from there
	$(if $(WHEELS),$(GPU_PYTHON) -m pip install --no-index --find-links $(WHEELS) --editable '.[vllm,bench]')
	$(GPU_PYTHON) -m experiments.gpu

bench-bfloat16: .venv/installed ## how often rounding changes an answer in bfloat16 and in float32: alone, in batches, streamed; real engine, a quarter of an hour
	$(RUN) experiments/bfloat16.py --json experiments/results/bfloat16.json

bench-context: .venv/installed ## which pages are in a context that cannot hold all of them, and do they hold the answer? two minutes
	$(RUN) experiments/context_choice.py --json experiments/results/context_choice.json

bench-langchain: .venv/installed ## a LangChain retriever that returns its list at once, and one in stages: embedded engine, five minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/langchain_stages.py --json experiments/results/langchain_stages.json

bench-adapters: .venv/installed ## LangChain, LlamaIndex and Haystack on vLLM, with streamrag and without; what adapters cost
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/adapters.py --json experiments/results/adapters.json

paper: .venv/installed ## the paper's tables and figures beside ours, and what beats them, simulated: experiments/results/paper.md, under 40 minutes of two idle cores, resumable
	$(RUN) -m experiments.paper

paper-full: .venv/installed ## the same with all queries and ten seeds, resumable: about 12 hours of two cores by its plan, and never run whole
	$(RUN) -m experiments.paper --scale full

bench-k-lpm: .venv/installed ## k-LPM on prompts that form a tree, beside its theorem's bound, simulated: a few minutes, resumable
	$(RUN) experiments/k_lpm.py --json experiments/results/k_lpm.json --plot experiments/results/k_lpm.png

bench-busy: .venv/installed ## what it costs to keep the engine less busy, by sending chunks later, simulated: minutes, resumable
	$(RUN) experiments/busy_price.py --json experiments/results/busy_price.json --plot experiments/results/busy_price.png

bench-small-host: .venv/installed ## does copying by cost hold its 2 % where host memory is small? minutes, simulated, resumable
	$(RUN) experiments/small_host.py --json experiments/results/small_host.json

bench-step: .venv/installed ## microseconds that planning a step takes over vLLM's own, with 50 and 500 requests; two minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/step_cost.py --json experiments/results/step_cost.json

bench-updates: .venv/installed ## send every update of a search, late ones or the last; by rank or in stable order; simulated, minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/updates.py --json experiments/results/updates.json

bench-near-end: .venv/installed ## a search on the model's own processors: what DelayedUpdates gives for what it takes; real engine, two minutes
	$(RUN) experiments/near_end.py --json experiments/results/near_end.json

bench-one-user: .venv/installed ## one user whose context changes faster than a step takes: does streaming make anybody wait? real engine, two minutes
	$(RUN) experiments/one_user.py --json experiments/results/one_user.json

bench-ahead: .venv/installed ## answers drafted while retrieval runs: seconds to the last token with drafts and without; real engine, ten minutes
	$(RUN) experiments/answer_ahead.py --json experiments/results/answer_ahead.json
	$(RUN) experiments/answer_ahead_tables.py

bench-depth: .venv/installed ## how many tokens of a draft should a step verify? ten policies; real engine, then simulated; twenty minutes
	$(RUN) experiments/speculation_depth.py --json experiments/results/speculation_depth.json --plot docs/speculation-depth.png

bench-listen: .venv/installed ## questions that are typed or spoken: seconds from the commit to the first and last token; real engine, then who pays under load, simulated; quarter of an hour
	$(RUN) experiments/open_questions.py --json experiments/results/open_questions.json
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/open_questions_simulated.py --json experiments/results/open_questions_simulated.json

bench-refresh: .venv/installed ## questions that need two documents: right answers with one retrieval and with retrieval in mid-answer, seconds, tokens; real engine, three minutes
	$(RUN) experiments/refresh.py --json experiments/results/refresh.json

bench-lanes: .venv/installed ## lanes beside as many engines that do both, 2 to 64, for three links, routers and speculation, simulated; StreamServe's ablation; 20 minutes up to 16 engines; LANES=--short takes one
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/lanes_simulated.py $(LANES) $(if $(filter --short,$(LANES)),,--json experiments/results/lanes_simulated.json)
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/streamserve.py --json experiments/results/streamserve.json

bench-lanes-whole: .venv/installed ## the engines of bench-lanes beside vLLM's own schedulers, simulated: do they agree? three minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/lanes_whole.py --json experiments/results/lanes_whole.json

bench-hand-over: .venv/installed ## one model's text streams into the next prompt: seconds between them, by how often it is sent; real engine, then GPUs simulated; ten minutes
	$(RUN) experiments/hand_over.py --json experiments/results/hand_over.json
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/hand_over_simulated.py --json experiments/results/hand_over_simulated.json

bench-routes: .venv/installed ## two ways to verify a draft, as speculative tokens and as a prompt: seconds to the whole answer; real engine, three minutes
	$(RUN) experiments/verification_routes.py --json experiments/results/verification_routes.json

bench-copies: .venv/installed ## answers copied from their prompts, by our scheduler and by vLLM's ngram: steps and seconds; real engine, eight minutes
	$(RUN) experiments/copies.py --json experiments/results/copies.json
	$(RUN) experiments/answer_ahead_tables.py

bench-ahead-simulated: .venv/installed ## the same on two H200s under load, simulated: crawls and searches up to twice saturation; half an hour of two cores; ONLY="200 tokens" runs a part
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/answer_ahead_simulated.py $(if $(ONLY),--only "$(ONLY)") --json experiments/results/answer_ahead_simulated.json
	$(RUN) experiments/answer_ahead_tables.py

bench-auto: .venv/installed ## overlap="auto" against always and never, and what learning costs, also with the retrieval that `make demo` recorded; real engine, half an hour
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/auto_overlap.py --json experiments/results/auto_overlap.json

bench-crawl: .venv/installed ## milliseconds of each step of a crawl, pages a second, the first page's delay, memory; near-duplicates
	$(RUN) experiments/crawling.py --json experiments/results/crawling.json
	$(RUN) experiments/near_duplicates.py

bench-postgres: .venv/installed ## what each rung of a ladder in PostgreSQL takes and finds, 20,000 rows: some minutes
	$(RUN) experiments/postgres.py --json experiments/results/postgres.json

bench-answers: .venv/installed ## 40 questions about the documentation: what does the demo's model answer rightly, and cite? real engine, an hour, resumable
	mkdir -p bench-results/answers
	$(RUN) experiments/answers.py --keep bench-results/answers --json experiments/results/answers.json

bench-hybrid: .venv/installed ## keywords, vectors and reranking: what each finds, how long it takes, what updates cost; a quarter of an hour
	$(RUN) experiments/hybrid.py --json experiments/results/hybrid.json

bench-retrieval: .venv/installed ## 90 plain questions about three other documentations: which settings find the answers? apt, or PACKAGES=FOLDER; a quarter of an hour
	mkdir -p bench-results/retrieval
	$(RUN) experiments/retrieval.py $(if $(PACKAGES),--packages $(PACKAGES)) --keep bench-results/retrieval --json experiments/results/retrieval.json

bench-index: .venv/installed ## DiskANN and IVF with 100,000 vectors, DOCUMENTS=FOLDER embedded first; SLOW=--slow as root: minutes to an hour
	@test -n "$(DOCUMENTS)" || { echo 'name a folder of documents, 20,000 passages or more:  make bench-index DOCUMENTS=FOLDER'; exit 1; }
	$(RUN) experiments/index_size.py $(DOCUMENTS) $(SLOW) --json experiments/results/index_size.json

bench-sessions: .venv/installed ## a session's questions while its context grows, data stream in, windows slide: H200 and L40S simulated, then a real engine, minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/sessions_simulated.py --json experiments/results/sessions_simulated.json --plot docs/session-latency.png
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/sessions.py --json experiments/results/sessions.json
	$(RUN) experiments/session_hits.py --json experiments/results/session_hits.json

bench-early-exit: .venv/installed ## a few answers told apart: passes that the early exit saves, and does it answer the same? small real model, two minutes
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/early_exit.py --json experiments/results/early_exit.json

bench-ray: .venv/installed ## what Ray costs, then seven routers on two replicas of a tiny engine in four scenarios; Linux, ten minutes
	$(RUN) experiments/ray_replicas.py holds --json experiments/results/ray_holds.json
	$(RUN) experiments/ray_replicas.py costs --json experiments/results/ray_costs.json
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/ray_replicas.py bench --json experiments/results/ray_replicas.json --docs experiments/studies/ray.md

bench-routing: .venv/installed ## eleven routers on 2, 8 and 64 simulated replicas; MOONCAKE=FILE AZURE=FILE replay traces; minutes, resumable
	VLLM_LOGGING_LEVEL=ERROR $(RUN) -m experiments.routing --scale 0.4 $(if $(MOONCAKE),--mooncake $(MOONCAKE)) $(if $(AZURE),--azure $(AZURE)) --json experiments/results/routing.json --plot docs/routing.png --docs experiments/studies/routing.md

bench-routing-full: .venv/installed ## the same with ten times the queries; resumable; an hour or more, and never run whole
	VLLM_LOGGING_LEVEL=ERROR $(RUN) -m experiments.routing --scale 4 --output bench-results/routing-full.jsonl $(if $(MOONCAKE),--mooncake $(MOONCAKE)) $(if $(AZURE),--azure $(AZURE)) --json bench-results/routing-full.json

bench-classes: .venv/installed ## what request classes, a budget and grouped prefill do to sessions; five minutes, simulated
	VLLM_LOGGING_LEVEL=ERROR $(RUN) experiments/session_classes.py --json experiments/results/session_classes.json

clean: ## remove what the targets made
	rm -rf .venv .venv-voice .uv .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/installed: pyproject.toml scripts/install.sh
	scripts/install.sh

.venv/nixl-installed: .venv/installed
	scripts/install.sh nixl

.venv-voice/installed: pyproject.toml scripts/install.sh
	scripts/install.sh voice
