# Outrider on NVIDIA GPUs (driver for CUDA 13). At the root of the repository:
#   docker build --file deploy/docker/cuda.Dockerfile --tag outrider:cuda .
# NOT RUN YET: like deploy/requirements/cuda.txt it was written on a machine without a GPU.
# The compiler stays: FlashInfer compiles for the GPU it finds, at its first use, into the cache.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 outrider \
 && useradd --uid 10001 --gid outrider --home-dir /var/cache/outrider --create-home outrider \
 && python3 -m venv /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH
WORKDIR /src
# The packages first: they change seldom.
COPY deploy/requirements/cuda.txt deploy/requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement deploy/requirements/cuda.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
# Compiled kernels, profiles, prepared GGUF files and models from the hub. Keep it in a volume.
ENV HOME=/var/cache/outrider \
    OUTRIDER_CACHE=/var/cache/outrider \
    FLASHINFER_WORKSPACE_BASE=/var/cache/outrider \
    TRITON_CACHE_DIR=/var/cache/outrider/triton
USER 10001:10001
WORKDIR /var/cache/outrider
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["outrider"]
CMD ["serve", "--host", "0.0.0.0"]
