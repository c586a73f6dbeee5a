"""The routes of vLLM that run the model. Imports nothing: `serve/routes.py` reads it without the engine."""

from __future__ import annotations

#: Every route of vLLM that runs the model.
GENERATION = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/decisions",
    "/v1/systemone",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/realtime",
    "/v2/embed",
    "/v2/rerank",
    "/cohere/v2/chat",
    "/inference/v1/generate",
    "/generate",
    "/generative_scoring",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/invocations",
    "/skyrl/v1/generate",
)
