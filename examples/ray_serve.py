"""kvik behind Ray Serve: each replica has an engine and all of kvik's API.

    pip install "kvik[structured]" "ray[serve]"
    serve run examples.ray_serve:app

Ray places, restarts and scales the replicas. A replica that divides a model among processes takes
as many CPUs; one with `distributed_executor_backend="ray"` also places stages of its pipeline on
other machines.
"""

from ray import serve
from starlette.types import ASGIApp

from kvik import AsyncLLM
from kvik.server import build_app

THREADS = 1
OPTIONS = {"device": "cpu", "threads": THREADS, "max_model_len": 512}


def build() -> ASGIApp:
    """Build the app in the replica, as neither an engine nor its app can be pickled."""
    return build_app(AsyncLLM(**OPTIONS))


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": THREADS}, max_ongoing_requests=256)
@serve.ingress(build)
class Kvik:
    """A replica."""


app = Kvik.bind()
