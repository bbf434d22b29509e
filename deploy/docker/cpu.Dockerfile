# Outrider on CPUs (x86-64). At the root of the repository:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=ADDRESS --file deploy/docker/cpu.Dockerfile --tag outrider:cpu .
# ADDRESS: PyTorch's package index for CPUs, as named on pytorch.org; PyPI's torch is made for CUDA.
# The second stage has the compiler, the third its results.
FROM debian:bookworm-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171 AS base

FROM base AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH
WORKDIR /src
# The packages first: they change seldom.
ARG PIP_EXTRA_INDEX_URL
COPY deploy/requirements/cpu.txt deploy/requirements/torch-cpu.txt deploy/requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement deploy/requirements/cpu.txt \
 && pip install --no-cache-dir --no-deps --requirement deploy/requirements/torch-cpu.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
# Elsewhere than among the sources, which Python would import. Headers and tests are of no use later: 140 MB.
WORKDIR /opt/outrider
RUN python -m outrider.kernels.cpu.build --install \
 && rm -rf /opt/outrider/lib/python3*/site-packages/torch/include /opt/outrider/lib/python3*/site-packages/torch/test

FROM base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 outrider \
 && useradd --uid 10001 --gid outrider --home-dir /var/cache/outrider --create-home outrider
COPY --from=build /opt/outrider /opt/outrider
# Profiles, prepared GGUF files and models from the hub. Keep it in a volume.
ENV PATH=/opt/outrider/bin:$PATH \
    HOME=/var/cache/outrider \
    OUTRIDER_CACHE=/var/cache/outrider
USER 10001:10001
WORKDIR /var/cache/outrider
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["outrider"]
CMD ["serve", "--host", "0.0.0.0"]
