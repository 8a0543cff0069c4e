"""Your own app: a custom route over the engine, and all of kvik's API below /llm."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import StreamingResponse

from kvik import AsyncLLM, SamplingParams
from kvik.server import build_app

engine = AsyncLLM(max_model_len=512)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/llm", build_app(engine))


@app.get("/story")
async def story(
    beginning: Annotated[str, Query(min_length=1)], tokens: Annotated[int, Query(ge=1)] = 64
) -> StreamingResponse:
    stream = engine.generate(beginning, SamplingParams(max_tokens=tokens, seed=1))
    return StreamingResponse((delta.text async for delta in stream), media_type="text/plain")


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app)
