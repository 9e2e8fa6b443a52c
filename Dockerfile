FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt hatchling \
    && python -m venv /opt/d2lpm
COPY router router
COPY workers workers
COPY bench bench
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/d2lpm/bin/pip install --no-cache-dir --constraint constraints.txt /wheels/*.whl

FROM python:3.13-slim
COPY --from=build /opt/d2lpm /opt/d2lpm
ENV PATH=/opt/d2lpm/bin:$PATH PYTHONUNBUFFERED=1 D2LPM_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["d2lpm"]
CMD ["serve"]
