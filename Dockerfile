# foretoken serve, on a CPU: docker build -t foretoken . && docker run --rm -p 8000:8000 -v models:/models foretoken
FROM python:3.12-slim AS build
# whatever compiler the base image has: what it makes is tested
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# the native decoder for every kind of processor of this architecture: the image needs no compiler
RUN FORETOKEN_PREBUILT=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY constraints.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu torch
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheels/foretoken-*.whl)[serve]" \
    && useradd --create-home --uid 10001 foretoken && install --directory --owner=foretoken /models
# by its number, so that a cluster can see that it is not root
USER 10001
# fetched models, the hub's cache and the program's own cache lie in one volume; none of these is a secret
# hadolint ignore=DL3064
ENV FORETOKEN_ZOO=/models/zoo HF_HOME=/models/hub XDG_CACHE_HOME=/models/cache
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["foretoken"]
CMD ["serve", "zoo:base", "--host", "0.0.0.0", "--port", "8000"]
