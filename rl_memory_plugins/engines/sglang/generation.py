"""The routes of SGLang that run the model. Imports nothing: `serve/routes.py` reads it without the engine."""

from __future__ import annotations

#: Every route of SGLang that runs the model.
GENERATION = (
    "/generate",
    "/encode",
    "/classify",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/score",
    "/v1/decisions",
    "/v1/rerank",
    "/v1/responses",
    "/v1/messages",
    "/v1/systemone",
    "/v1/audio/transcriptions",
    "/v1/realtime",
    "/api/chat",
    "/api/generate",
    "/invocations",
    "/vertex_generate",
)
