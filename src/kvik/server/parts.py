"""What the server is made of. `cli/serve.py` puts it together; handlers take what they need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvik.config.server_config import ServerConfig
from kvik.server.drain import Drain
from kvik.server.keys import Keys

if TYPE_CHECKING:
    from kvik.core.sampling_params import SamplingParams
    from kvik.engine.async_client import AsyncEngineClient
    from kvik.server.admission import Admission
    from kvik.server.generation import Generations
    from kvik.server.observer import Observer
    from kvik.server.texts import Texts


@dataclass(frozen=True, slots=True)
class Parts:
    """One server.

    Attributes:
        config: what the operator asked for.
        model_names: what clients may call the model; answers use the first.
        engine: where requests are run; `engine.config` has the facts of the model.
        texts: tokenizer and chat template.
        generations: starts requests, and hands out what they bring.
        admission: decides whether there is room for one more.
        observer: is told of everything that happens to requests.
        default_params: what the model's authors advise; a request's own parameters go before.
        keys: who may call.
        drain: whether the server is being stopped.
        started: when, in seconds since 1970.
    """

    config: ServerConfig
    model_names: tuple[str, ...]
    engine: AsyncEngineClient
    texts: Texts
    generations: Generations
    admission: Admission
    observer: Observer
    default_params: SamplingParams
    keys: Keys = field(default_factory=Keys)
    drain: Drain = field(default_factory=Drain)
    started: int = 0

    @property
    def model_name(self) -> str:
        return self.model_names[0]
