# The server in a container. On a CPU, or on a GPU with NVIDIA's container toolkit:
#   docker build -t megatron-ssm .
#   docker run -p 127.0.0.1:8000:8000 -v DIR:/model:ro megatron-ssm --served-model-name NAME
#   docker build -t megatron-ssm:gpu --target gpu .
#   docker run --gpus all --shm-size 1g -p 127.0.0.1:8000:8000 -v DIR:/model:ro megatron-ssm:gpu
# The GPU's image has PyTorch's operations only; docs/guides/gpus.md tells how to install faster kernels.
# The port is open to other machines only with -p 8000:8000: then give --api-key-file. --stop-timeout 90 lets requests end.
FROM debian:trixie-slim AS base
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv libgomp1 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 serve
ENV PATH=/venv/bin:$PATH
EXPOSE 8000
HEALTHCHECK --start-period=15m --timeout=10s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["megatron-ssm", "serve", "--host", "0.0.0.0", "--model", "/model"]

FROM base AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && python3 -m venv /venv

FROM build AS build-gpu
RUN pip install --no-cache-dir torch
COPY . /src
RUN pip install --no-cache-dir '/src[hf,serve]'

FROM build AS build-cpu
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install --no-cache-dir '/src[hf,serve]'

FROM base AS gpu
COPY --from=build-gpu /venv /venv
USER serve

FROM base AS cpu
COPY --from=build-cpu /venv /venv
USER serve
